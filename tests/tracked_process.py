# SPDX-License-Identifier: Apache-2.0
"""A process that tracks a made-up run with the real W&B client, and does what stdin says.

Usage: tracked_process.py RUN ATTEMPT CLOSE_SECONDS. Lines: `log FIRST LAST`; `weights PATH`, logged
by reference; `report PATH`; `checks`, a table; `freeze`, stops the client's helper process; `halt`
and `preempt`, end the run by such an error; `end`. Each is answered by a line when it was left with
the courier; the last line is the number of lost rows.
"""

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
from accelerate import PartialState

from mprecipes import Preempted, Tracking
from mprecipes.errors import RecipeError, ResumeHalted

CONFIG = {"recipe": "made_up", "precision": "bf16", "nested": {"rate": 0.5}, "betas": [0.9, 0.95]}
REST = {"expected": "nothing", "where": "step 10", "action": "look"}


def values(step: int) -> dict[str, float]:
    """What every attempt logs at a step; not finite at step 3."""
    return {"train/loss": 10 / step, "train/grad_norm": float("nan") if step == 3 else step / 7}


def main() -> None:
    path, attempt, close_seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    PartialState()  # accelerate's trackers log through it
    run = SimpleNamespace(
        path=path, run_id="0123abcd", wandb_id="0123abcd", attempt=attempt, is_main=True
    )
    tracking = Tracking(run, ["wandb"], close_seconds=close_seconds)
    try:
        with tracking:
            tracking.begin(CONFIG)
            for line in sys.stdin:
                obey(tracking, line.split())
                print("done", line.strip(), flush=True)
                if line.strip() == "end":
                    break
    except RecipeError as error:
        print("ended by", error.outcome, flush=True)
    print("lost", tracking.lost, flush=True)


def obey(tracking: Tracking, words: list[str]) -> None:
    if words[0] == "log":
        for step in range(int(words[1]), int(words[2]) + 1):
            tracking.log(step, values(step))
    elif words[0] == "weights":
        tracking.reference("weights", "checkpoint", {"model.safetensors": Path(words[1])})
    elif words[0] == "report":
        tracking.report("resume-report", "resume", Path(words[1]))
    elif words[0] == "checks":
        tracking.table(10, "resume/checks", ["check", "verdict"], [["weights", "ok"], ["order", 1]])
    elif words[0] == "freeze":
        for child in psutil.Process().children():
            if child.name() == "wandb-core":
                child.send_signal(signal.SIGSTOP)
    elif words[0] == "halt":
        raise ResumeHalted("the losses differ", **REST)
    elif words[0] == "preempt":
        raise Preempted("asked to stop", **REST)


if __name__ == "__main__":
    main()
