# SPDX-License-Identifier: Apache-2.0
"""How an attempt ended, from any exception: outcome, exit code, text without absolute paths."""

import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from mprecipes.errors import FellBack, OutOfMemory, RecipeError

FIRST_RANK_SECONDS = 5.0


@contextlib.contextmanager
def exit_codes(*, wait: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Turns the errors of `mprecipes.errors` into one readable message and the exit code of each.

    The first rank of a machine prints the whole message to stderr, the others its first line,
    except out of memory, which is one rank's own. The launcher ends all ranks when one has exited,
    so the others leave the first one time to come to the same error and say all of it. Other
    exceptions pass with their traceback (exit code 1). What the console's encoding lacks is
    printed as a question mark.

    Args:
        wait: called by a rank that printed one line, with FIRST_RANK_SECONDS.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # no name and no line drawn ends a training
    try:
        yield
    except RecipeError as error:
        text, is_whole = f"{type(error).__name__}: {error}", True
        if world_size > 1:
            is_first_here = os.environ.get("LOCAL_RANK", str(rank)) == "0"  # a console a machine
            is_whole = is_first_here or isinstance(error, OutOfMemory)
            text = f"[rank {rank}] {text if is_whole else text.splitlines()[0]}"
        with contextlib.suppress(OSError):  # a console that is gone changes no exit code
            print(text, file=sys.stderr, flush=True)
        if not is_whole and error.exit_code:
            wait(FIRST_RANK_SECONDS)
        raise SystemExit(error.exit_code) from None


def judge(error: BaseException | None, rank: int) -> dict[str, Any]:
    """Gives outcome, exit code and error text of an attempt from what ended it."""
    if error is None:
        return {"outcome": "finished", "exit_code": 0, "error": None}
    text = f"rank {rank}: {type(error).__name__}: {error}"[:4000]
    if isinstance(error, FellBack) and error.rung is not None:
        facts = {"outcome": error.outcome, "exit_code": error.exit_code, "error": text}
        return {**facts, "fallback": error.rung}
    if isinstance(error, RecipeError):
        return {"outcome": error.outcome, "exit_code": error.exit_code, "error": text}
    if is_out_of_memory(error):
        return {"outcome": "out_of_memory", "exit_code": OutOfMemory.exit_code, "error": text}
    if isinstance(error, KeyboardInterrupt):
        return {"outcome": "interrupted", "exit_code": 130, "error": text}
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return {"outcome": "exited", "exit_code": code, "error": text}
    return {"outcome": "crashed", "exit_code": 1, "error": text}


def is_out_of_memory(error: BaseException) -> bool:
    """Knows Python's, CUDA's (by name: torch is not imported here) and torch's CPU allocator's."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def out_of_memory(error: BaseException, rank: int, step: int, config: dict) -> OutOfMemory:
    """Gives our error for an out-of-memory of torch or Python, with what to try for this config."""
    rows = config.get("per_device_train_batch_size")
    advice = "take shorter sequences, a smaller model, activation checkpointing, or more processes"
    if isinstance(rows, int) and rows > 1:
        advice = f"launch again with --per_device_train_batch_size {rows // 2}; or {advice}"
    return OutOfMemory(
        (str(error).splitlines() or [type(error).__name__])[0],
        expected="memory for parameters, optimizer state, gradients and the activations of one "
        "micro-batch",
        where=f"rank {rank}, after step {step}",
        action=advice,
    )


def without_paths(value: Any) -> Any:
    """Gives a JSON value in which an absolute path is shortened to its last part."""
    if isinstance(value, str):
        return re.sub(r"(?<![\w./~-])/(?:[^\s/'\"]+/)+", ".../", value)
    if isinstance(value, dict):
        return {name: without_paths(item) for name, item in value.items()}
    return [without_paths(item) for item in value] if isinstance(value, list | tuple) else value
