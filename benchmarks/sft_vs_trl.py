# SPDX-License-Identifier: Apache-2.0
"""Does `sft_chat` train what TRL's SFTTrainer trains, and as fast?

One tiny Llama, one set of chats, one template with generation marks, FP32, padded rows, the same
rows in the same order (TRL reads them in sequence), AdamW with the same numbers: loss per step side
by side, and target tokens per second over the later half of the steps, by the clock and by the time
of the process, which other work on the machine hardly changes. TRL is installed into an environment
of its own that sees this one's packages. What differs is printed below the table.

Usage: python -m benchmarks.sft_vs_trl --dir FOLDER [--steps 20] [--rounds 1]
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRL = "trl==1.16.0"
BATCH, LENGTH, RATE = 4, 512, 1e-3
MODEL = {
    "model_type": "llama", "vocab_size": 259, "hidden_size": 256, "intermediate_size": 704,
    "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": LENGTH,
}  # fmt: skip
DIFFERENCES = (
    "TRL's defaults are BF16 autocast and shuffled rows; here it is told otherwise",
    "TRL takes the mean over a batch's targets, here a sum is divided by the count of the step; "
    "with one micro-batch a step both are the same number",
    "TRL masks padding by a 2-D mask, here every row has a causal mask over its own segments",
    "here a journal line with a digest of the batch is written at every step",
)


def make_inputs(folder: Path, steps: int) -> None:
    """Writes the model, the tokenizer and the chats in the order in which they will be seen."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mprecipes.data.conversations import open_conversations
    from mprecipes.data.order import SampleOrder
    from tests.chats import BY_NAME, tokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    made = tokenizer(BY_NAME["chatml-marked"])
    made.save(folder / "model")
    model.save_pretrained(folder / "model")
    chats = []
    for each in open_conversations("docstrings"):
        if sum(len(message["content"]) for message in each.messages) < LENGTH - 60:
            chats.append({"messages": each.messages})
        if len(chats) == steps * BATCH:
            break
    order = SampleOrder(len(chats), 1)(0, len(chats))
    for name, rows in (("ours", chats), ("theirs", [chats[row] for row in order])):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="ascii")


@dataclass
class Side:
    """Loss, seconds and seconds of the process's own time, each step."""

    losses: list[float]
    seconds: list[float]
    process_seconds: list[float]


OURS = """
import importlib.util, json, sys, time
import mprecipes as mp
spec = importlib.util.spec_from_file_location("recipe", {recipe!r})
recipe = importlib.util.module_from_spec(spec)
sys.modules["recipe"] = recipe
spec.loader.exec_module(recipe)
write, ends = mp.Journal.write, []
def timed(*args, **kwargs):
    ends.append(time.process_time())
    return write(*args, **kwargs)
mp.Journal.write = timed
recipe.main()
with open({clock!r}, "w") as file:
    json.dump(ends, file)
"""


def ours(folder: Path, steps: int, run: Path) -> tuple[Side, list[int]]:
    """Gives what was measured of every step of the recipe, and its targets."""
    words = {
        "dataset": folder / "ours.jsonl", "model_name_or_path": folder / "model", "seed": 1,
        "chat": json.dumps({"batching": "plain"}), "seq_length": LENGTH, "eval_fraction": "none",
        "per_device_train_batch_size": BATCH, "max_steps": steps, "learning_rate": RATE,
        "warmup_steps": 0, "lr_scheduler_type": "linear", "precision": "fp32", "output_dir": run,
        "save_steps": steps,
    }  # fmt: skip
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml")]
    script, clock = folder / "ours.py", folder / "ours.json"
    script.write_text(OURS.format(recipe=str(ROOT / "recipes" / "sft_chat.py"), clock=str(clock)))
    command += [str(script)]
    command += [str(word) for name, value in words.items() for word in (f"--{name}", value)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    lines = (run / "journal" / "attempt-0000.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    ends = json.loads(clock.read_text())
    return Side(
        losses=[record["loss"] for record in records],
        seconds=[record["step_seconds"] for record in records],
        process_seconds=[0.0, *(b - a for a, b in itertools.pairwise(ends))],
    ), [record["tokens"] for record in records]


THEIRS = """
import json, sys, time
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
folder, steps, batch, length, rate, threads = sys.argv[1], *map(float, sys.argv[2:])
torch.set_num_threads(int(threads))
class Clock(TrainerCallback):
    losses, ends, process = [], [time.perf_counter()], [time.process_time()]
    def on_step_end(self, *_, **__):
        self.ends.append(time.perf_counter())
        self.process.append(time.process_time())
    def on_log(self, args, state, control, logs=None, **__):
        if "loss" in logs: self.losses.append(logs["loss"])
model = AutoModelForCausalLM.from_pretrained(folder + "/model", dtype=torch.float32)
trainer = SFTTrainer(
    model=model, processing_class=AutoTokenizer.from_pretrained(folder + "/model"),
    train_dataset=load_dataset("json", data_files=folder + "/theirs.jsonl", split="train"),
    callbacks=[Clock()],
    args=SFTConfig(
        output_dir=folder + "/trl", max_steps=int(steps), per_device_train_batch_size=int(batch),
        gradient_accumulation_steps=1, learning_rate=rate, lr_scheduler_type="linear",
        warmup_steps=0, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, bf16=False,
        use_cpu=True, assistant_only_loss=True, packing=False, max_length=int(length),
        train_sampling_strategy="sequential", logging_steps=1, logging_strategy="steps",
        report_to="none", save_strategy="no", gradient_checkpointing=False, seed=1,
        eos_token="<|im_end|>", dataloader_pin_memory=False, disable_tqdm=True,
    ),
)
trainer.train()
both = [[b - a for a, b in zip(ends, ends[1:])] for ends in (Clock.ends, Clock.process)]
print("RESULT " + json.dumps([Clock.losses, *both]))
"""


def theirs(folder: Path, steps: int, python: Path) -> Side:
    """Gives what was measured of every step of TRL's trainer."""
    threads = os.environ.get("MPRECIPES_CPU_THREADS") or os.cpu_count() or 1
    words = [str(each) for each in (folder, steps, BATCH, LENGTH, RATE, threads)]
    done = subprocess.run(
        [str(python), "-c", THEIRS, *words], stdout=subprocess.PIPE, text=True, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not found:
        sys.exit(f"TRL ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return Side(*json.loads(found[0].removeprefix("RESULT ")))


def environment(folder: Path) -> Path:
    """Makes TRL's own environment, which sees the packages of this one, and gives its Python."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "venv", with_pip=True)
        [site] = (folder / "venv" / "lib").glob("python*/site-packages")
        (site / "parent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", "--no-deps", TRL], check=True
        )  # fmt: skip
    return python


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    known = parser.parse_args()
    folder, steps = known.dir.resolve(), known.steps
    folder.mkdir(parents=True, exist_ok=True)
    python = environment(folder)
    make_inputs(folder, steps)
    half = slice(steps // 2, steps)
    rates: dict[str, list[tuple[float, float]]] = {"clock": [], "process": []}
    for number in range(known.rounds):
        run = folder / f"run-{time.time_ns()}"
        (mine, targets), other = ours(folder, steps, run), theirs(folder, steps, python)
        for kind, of in (("clock", "seconds"), ("process", "process_seconds")):
            both = tuple(
                sum(targets[half]) / sum(getattr(side, of)[half]) for side in (mine, other)
            )
            rates[kind].append(both)  # type: ignore[arg-type]
        told = [f"by the {k} {v[-1][0]:.0f} and {v[-1][1]:.0f}" for k, v in rates.items()]
        print(f"round {number + 1}: ours and TRL's targets/s {', '.join(told)}", flush=True)
    print("step  ours      TRL       difference")
    for step, (left, right) in enumerate(zip(mine.losses, other.losses, strict=True), start=1):
        print(f"{step:>4}  {left:.5f}  {right:.5f}  {left - right:+.1e}")
    largest = max(abs(a - b) for a, b in zip(mine.losses, other.losses))
    speed = {kind: statistics.median(a / b for a, b in pairs) for kind, pairs in rates.items()}
    told = [f"{value:.2f} of TRL's by the {kind}" for kind, value in speed.items()]
    print(f"largest difference {largest:.1e} (allowed 1e-3); speed {', '.join(told)}")
    print("\n".join(f"- {line}" for line in DIFFERENCES))
    sys.exit(0 if largest <= 1e-3 else 1)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
