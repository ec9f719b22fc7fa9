# SPDX-License-Identifier: Apache-2.0
"""What a comparison of losses alone makes of each planted fault, beside the five checks.

    python -m tests.resume.sabotage_table [FOLDER [FAULT ...]]

A small model on the standard library's text is killed after step 108; each fault is planted in a
resume from step 100, once with the gate on (which check finds it, and when) and once with every
check set to `warn`, so that the run goes on to step 200. Fixed before the faults were chosen: a
loss-only check compares the mean loss of the 5 steps after the resume with the loss stored at the
save, and says no beyond 5 %. The gap is that of the mean loss over the last 20 of 100 further steps
against the clean resume's on as many processes. Where the loss-only check says no to that clean
resume too, its no to the fault is a false alarm.
"""

import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from tests.fix64 import options
from tests.reading import attempt_lines, resume_report, trace
from tests.recipe_server import run_recipe
from tests.resume.plants import PLANTS, Plant

SAVE, KILL, END, LAST = 100, 108, 200, 20
TOLERANCE, WINDOW = 0.05, 5
MODEL = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "attention_dropout": 0.1, "tie_word_embeddings": True,
}  # fmt: skip
WARN = dict.fromkeys(("weights", "optimizer", "data_order", "communication"), "warn")

CLEAN = (
    Plant("nothing", "nothing (a clean resume)", "-"),
    Plant("nothing", "nothing, two processes", "-", world_size=2),
)


def words(run: Path, plant: Plant, **probation: object) -> list[str]:
    values = {
        "seq_length": 64, "model_config": json.dumps(MODEL), "per_device_train_batch_size": 4,
        "max_steps": END, "save_steps": 50, "warmup_steps": 10, "learning_rate": 3e-3,
        "logging_steps": 200,
        "watch": json.dumps({"on_spike": None}), "precision": plant.precision,
        "probation": json.dumps(probation),
    }  # fmt: skip
    return options("stdlib", run, **values)


def losses(run: Path) -> dict[int, float]:
    return {step: float.fromhex(values[3]) for step, values in trace(run).items()}


def mean(found: dict[int, float], first: int, last: int) -> float:
    return statistics.fmean(found[step] for step in range(first, last + 1))


def base(folder: Path, plant: Plant) -> Path:
    """The run that a SIGKILL ended, once for each number of processes and precision."""
    pace = "paced" if plant.name == "rank_one_slow" else None
    run = folder / f"base-{plant.world_size}-{plant.precision}-{pace}"
    if not run.exists():
        env = {"MPRECIPES_FAULT": f"kill@step:{KILL}"}
        run_recipe(words(run, plant), world_size=plant.world_size, plant=pace, env=env)
    return run


def resumed(folder: Path, plant: Plant, name: str | None, **probation: object) -> Path:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(base(folder, plant), run)
    line = words(run, plant, **probation)
    run_recipe(line, world_size=plant.world_size, plant=name, timeout=240, grace=3)
    return run


def row(folder: Path, plant: Plant) -> list[str]:
    """One line of the table."""
    limit = {"communication_seconds": 3.0}
    run = resumed(folder, plant, plant.name, **limit)
    report = resume_report(run, 1)
    failed = [c["name"] for c in report["checks"] if c["verdict"] in ("failed", "warned")]
    found = ", ".join(name for name in failed if name != "replay") or "nothing"
    lines = attempt_lines(run, 1) if (run / "journal" / "attempt-0001.jsonl").exists() else []
    when = "before the first step"
    if lines:
        halted = report["verdict"] == "halted"
        when = f"at step {len(lines)} after the resume" if halted else "in 5 steps, as a warning"
    when = when if failed else "-"
    if plant.name == "collective_hangs":
        return [plant.title, found, when, "no step is ever made", "-", "-"]
    is_paced = plant.name == "rank_one_slow"
    clean_name = f"clean-{plant.world_size}-{plant.precision}-{is_paced}.json"
    if not (folder / clean_name).exists():
        clean = resumed(folder, plant, "paced" if plant.name == "rank_one_slow" else None)
        (folder / clean_name).write_text(json.dumps(losses(clean)))
    clean = {int(k): v for k, v in json.loads((folder / clean_name).read_text()).items()}
    now = losses(resumed(folder, plant, plant.name, **WARN, **limit))
    stored = clean[SAVE]
    difference = mean(now, SAVE + 1, SAVE + WINDOW) / stored - 1.0
    is_alarm = abs(mean(clean, SAVE + 1, SAVE + WINDOW) / stored - 1.0) > TOLERANCE
    says = "found" if abs(difference) > TOLERANCE else "missed"
    if is_alarm:
        says = "false alarm"
    elif plant.name == "nothing":
        says = "-"
    if max(now) < END:
        return [plant.title, found, when, f"{difference:+.1%}", says, f"ended at step {max(now)}"]
    gap = mean(now, END - LAST + 1, END) - mean(clean, END - LAST + 1, END)
    return [plant.title, found, when, f"{difference:+.1%}", says, f"{gap:+.4f}"]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    head = ["planted", "found by", "when", "loss of 5 steps against the stored one",
            "loss-only check (5 %)", "loss gap 100 steps later (nats)"]  # fmt: skip
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    rows = []
    chosen = [plant for plant in PLANTS if plant.name in sys.argv[2:] or not sys.argv[2:]]
    for plant in (*CLEAN, *chosen):
        rows.append(row(folder, plant))
        print("| " + " | ".join(rows[-1]) + " |", flush=True)
    rows = rows[len(CLEAN) :]
    found = sum(each[1] != "nothing" for each in rows)
    says = [each[4] for each in rows]
    print(
        f"\nThe five checks find {found} of {len(rows)}; a loss-only check misses "
        f"{says.count('missed')}, finds {says.count('found')}, and says no to "
        f"{says.count('false alarm')} as it does to a clean resume."
    )


if __name__ == "__main__":
    main()
