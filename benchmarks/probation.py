# SPDX-License-Identifier: Apache-2.0
"""What a probation costs beside the observed steps, in step times of the same run.

    python -m benchmarks.probation [PROCESSES]

A small model on the standard library's text is killed and resumed; the seconds are those of the
resume report, and the step is the median of the steps after it. Also: what the probe of a save
costs.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from tests.fix64 import options
from tests.reading import attempt_lines, resume_report
from tests.recipe_server import run_recipe
from tests.resume.sabotage_table import MODEL


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("processes", type=int, nargs="?", default=1)
    world_size = parser.parse_args().processes
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = options(
            "stdlib", run, seq_length=128, per_device_train_batch_size=8, max_steps=60,
            save_steps=20, precision="fp32", logging_steps=100,
            model_config=json.dumps({**MODEL, "hidden_size": 128, "max_position_embeddings": 128}),
        )  # fmt: skip
        for env in ({"MPRECIPES_FAULT": "kill@step:42"}, {}):
            run_recipe(words, world_size=world_size, env=env, timeout=240)
        rows = {check["name"]: check for check in resume_report(run, 1)["checks"]}
        step = statistics.median(line["step_seconds"] for line in attempt_lines(run, 1))
    parts = {
        "one pass over the state (digests)": rows["weights"]["seconds"],
        "probe, forward and backward": rows["optimizer"]["seconds"],
        "batches that are due, read once more": rows["data_order"]["seconds"],
        "collectives": rows["communication"]["seconds"],
    }
    print(f"{world_size} processes, median step {step:.4f} s")
    for name, seconds in parts.items():
        print(f"{name}: {seconds:.4f} s, {seconds / step:.2f} steps")
    extra = sum(parts.values()) - parts["one pass over the state (digests)"]
    print(f"beside the observed steps and the pass: {extra / step:.2f} step times (limit 2)")


if __name__ == "__main__":
    main()
