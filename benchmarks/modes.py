# SPDX-License-Identifier: Apache-2.0
"""Held-out loss of bf16, fp16 and fp8 against fp32, three seeds, paired by seed.

    python -m benchmarks.modes --steps 60 --fp16_steps 20

Each run is the recipe's own `main()` in this process, on text of the standard library, with a Llama
of about a million parameters. FP16 on a CPU is about twelve times slower: it makes fewer steps, and
is compared with FP32 at that many.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from mprecipes import read_metrics
from tests.inprocess import train

MODEL = {
    "model_type": "llama", "vocab_size": 272, "hidden_size": 128, "intermediate_size": 352,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip


def heldout_loss(folder: Path, precision: str, seed: int, steps: int) -> float:
    """Trains once and gives the held-out loss at the end, in nats per byte."""
    run = folder / f"{precision}-{seed}-{steps}"
    values = {
        "dataset": "stdlib", "seq_length": 128, "eval_fraction": 0.0002, "eval_steps": steps,
        "model_config": json.dumps(MODEL), "precision": precision, "seed": seed,
        "per_device_train_batch_size": 4, "max_steps": steps, "warmup_steps": steps // 10,
        "learning_rate": 2e-3, "save_steps": 10 * steps, "output_dir": run,
    }  # fmt: skip
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    done = train([*words, "--allow_unvalidated_fp8"])
    if done.error is not None:
        raise done.error
    lines, _ = read_metrics(run / "metrics.jsonl")
    return [line["eval/loss"] for line in lines if "eval/loss" in line][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fp16_steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    table: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for precision, steps in (
                ("fp32", args.fp16_steps), ("fp16", args.fp16_steps),
                ("fp32", args.steps), ("bf16", args.steps), ("fp8", args.steps),
            ):  # fmt: skip
                loss = heldout_loss(Path(folder), precision, seed, steps)
                table.setdefault((precision, steps), []).append(loss)
                print(f"seed {seed} {precision} {steps} steps: {loss:.5f}", flush=True)
    print("mode   steps  mean loss  mean gap to fp32 (paired)  spread of fp32 over seeds")
    for (precision, steps), losses in table.items():
        right = table["fp32", steps]
        gap = statistics.mean(a - b for a, b in zip(losses, right, strict=True))
        mean, spread = statistics.mean(losses), max(right) - min(right)
        share = 100 * gap / statistics.mean(right)
        print(f"{precision:6} {steps:5}  {mean:9.5f}  {gap:+.5f} ({share:+.3f} %)  {spread:.5f}")


if __name__ == "__main__":
    main()
