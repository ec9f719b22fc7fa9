# SPDX-License-Identifier: Apache-2.0
"""Processes that track a run with the real W&B client: started, told what to do, waited for."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import environment

CHILD = Path(__file__).parents[1] / "tracked_process.py"


class Tracked:
    """A running `tests/tracked_process.py`; a context manager that kills what is left of it."""

    def __init__(self, run: Path, attempt: int, env: dict[str, str], close_seconds: float) -> None:
        home = run.parent / "home"
        home.mkdir(exist_ok=True)
        run.mkdir(exist_ok=True)
        known = {k: v for k, v in environment().items() if not k.startswith("WANDB_")}
        command = [sys.executable, str(CHILD), str(run), str(attempt), str(close_seconds)]
        self.process = subprocess.Popen(
            command,
            env={**known, "HOME": str(home), "WANDB_ERROR_REPORTING": "false", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> "Tracked":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def tell(self, *lines: str) -> None:
        """Gives orders, without waiting until they are carried out."""
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{line}\n" for line in lines))
        self.process.stdin.flush()

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Polls; fails when the process ends first, or time runs out."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, as by a lost machine; waits until the client's helper is gone, too."""
        self.process.kill()
        self.process.communicate()

    def end(self, *lines: str) -> str:
        """Gives the last orders; gives the output of the process when it ended with exit code 0."""
        output = self.process.communicate("".join(f"{line}\n" for line in lines), timeout=90)[0]
        assert self.process.returncode == 0, output
        return output


@pytest.fixture(scope="module")
def tracked():
    """Gives a function that starts a process which tracks the run folder it is given."""

    def start(run: Path, attempt: int = 0, *, close_seconds: float = 20.0, **env: str) -> Tracked:
        return Tracked(run, attempt, env, close_seconds)

    return start


def num_bytes(folder: Path) -> int:
    """Gives the size of everything in a folder, links not followed."""
    paths = [Path(at) / name for at, _, names in os.walk(folder) for name in names]
    return sum(path.lstat().st_size for path in paths)
