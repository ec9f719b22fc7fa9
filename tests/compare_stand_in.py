# SPDX-License-Identifier: Apache-2.0
"""Acts as `accelerate launch RECIPE ...` for a comparison: writes a run folder, trains nothing.

`--acts ARM=HOW[,...]` says what becomes of a mode: `oom` (recorded as the recipe records it),
`refuse` (dies before there is a folder), `numerics` (ends at half of its steps), `order` (other
batches), `worse`, `fast`, `dies` (is killed in its first launch, half way), `waits` (in its first
launch half of its steps, and then until SIGTERM, upon which it ends as preempted), `big=SIZE` (out
of memory with a larger batch per device).
"""

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

from tests.made_runs import make_run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--config")
    for name in ("precision", "output_dir", "acts", "numerics"):
        parser.add_argument(f"--{name}", default="")
    for name in ("seed", "max_steps", "eval_steps", "per_device_train_batch_size"):
        parser.add_argument(f"--{name}", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps")
    parser.add_argument("--allow_unvalidated_fp8", action="store_true")
    asked = parser.parse_args()
    acts = dict(pair.split("=", 1) for pair in asked.acts.split(",") if pair)
    folder, how, steps = Path(asked.output_dir), acts.get(asked.precision, ""), asked.max_steps
    again = folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    made = {"mode": asked.precision, "seed": asked.seed, "eval_steps": asked.eval_steps,
            "num_steps": steps, "horizon": steps}  # fmt: skip
    print(f"acting {how or 'healthy'}, visible devices {os.environ.get('CUDA_VISIBLE_DEVICES')}")
    if how == "refuse":
        sys.exit("precision: refused, and said why")
    if how == "oom" or (how.startswith("big") and asked.per_device_train_batch_size > int(how[4:])):
        make_run(folder, **{**made, "num_steps": 0}, outcome="out_of_memory", error="no memory")
        sys.exit(1)
    if how == "numerics":
        make_run(folder, **{**made, "num_steps": steps // 2}, outcome="numerics")
        sys.exit(1)
    if how in ("dies", "waits") and not again:
        if how == "waits":  # from before anybody can see the folder and send it
            signal.signal(signal.SIGTERM, lambda *_: _preempted(folder, made, steps))
        make_run(folder, **{**made, "num_steps": steps // 2}, outcome="killed")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    extra = {
        "order": {"shifted": 1}, "worse": {"above": 0.3}, "fast": {"tokens_per_second": 2000.0},
    }.get(how, {})  # fmt: skip
    make_run(folder, **made, **extra)


def _preempted(folder: Path, made: dict, steps: int) -> None:
    shutil.rmtree(folder)
    make_run(folder, **{**made, "num_steps": steps // 2}, outcome="preempted")
    sys.exit(75)


if __name__ == "__main__":
    main()
