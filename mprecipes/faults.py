# SPDX-License-Identifier: Apache-2.0
"""Named points at which a test or a drill may plant a fault; without the variable they do nothing.

`MPRECIPES_FAULT="ACTION@POINT[:STEP][@rankR]"`, several separated by commas. Actions: `kill`
(SIGKILL to itself), `terminate` (SIGTERM to itself), `eio` and `enospc` (raise that `OSError`),
`delay` (waits up to 50 ms, by chance), `slow` (half a second each time) and `exit` (raises
SystemExit, which ends a thread).
Without `@rankR` every rank that reaches the point takes part; without `:STEP` the first visit does.
"""

import errno
import os
import random
import signal
import time

VARIABLE = "MPRECIPES_FAULT"
SLOW_SECONDS = 0.5


def fault_point(point: str, step: int | None = None) -> None:
    """Acts out the faults planted for this point, step and rank; a no-op in every ordinary run."""
    planted = os.environ.get(VARIABLE)
    if not planted:
        return
    for fault in planted.split(","):
        action, _, rest = fault.strip().partition("@")
        rest, _, rank = rest.partition("@rank")
        name, _, wanted_step = rest.partition(":")
        if name != point or (wanted_step and (step is None or int(wanted_step) != step)):
            continue
        if rank and int(rank) != int(os.environ.get("RANK", "0")):
            continue
        _act(action, point)


def _act(action: str, point: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif action == "eio":
        raise OSError(errno.EIO, f"planted fault at {point}")
    elif action == "enospc":
        raise OSError(errno.ENOSPC, f"planted fault at {point}")
    elif action == "delay":
        time.sleep(random.SystemRandom().uniform(0.0, 0.05))  # draws nothing from a training's own
    elif action == "slow":
        time.sleep(SLOW_SECONDS)
    elif action == "exit":
        raise SystemExit(f"planted fault at {point}")
    else:
        known = "kill, terminate, eio, enospc, delay, slow, exit"
        raise ValueError(f"{VARIABLE}: unknown action {action!r}; use {known}")
