# SPDX-License-Identifier: Apache-2.0
"""Being asked to stop: signals, the launcher's death and a file STOP become a flag.

Handlers only remember which signal came; the recipe reads the flag at step boundaries, and what
follows (agreeing over ranks, saving, exit 75) is its own. A handler interrupts, prints and writes
nothing.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from mprecipes.errors import Preempted
from mprecipes.identity.request import RequestFile

STOP_FILE = "STOP"
INSISTENCE_SECONDS = 3.0  # one Ctrl-C comes twice: from the terminal and from the launcher


class Run(Protocol):
    """What is used of a run folder."""

    @property
    def path(self) -> Path: ...
    @property
    def writes_here(self) -> bool: ...


class Signals:
    """Watches for SIGTERM, SIGUSR1, SIGINT, the death of the parent process, and a file STOP.

    Enter it before anything else and leave it last: the launcher's death before is not seen, and a
    launcher sends SIGTERM to every rank that is still writing down its end when the first is gone.
    The first request counts and repeats change nothing, except that a SIGINT at least 3 seconds
    after the first SIGINT restores what SIGINT did before and raises KeyboardInterrupt. Python lets
    only the main thread install handlers: entered elsewhere, only the parent is watched.

    Args:
        clock: seconds from a fixed point, monotonic.
    """

    watched = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reason: str | None = None
        self._interrupted_at: float | None = None
        self._parent = os.getppid()
        self._before: dict[int, Any] = {}
        self._file: RequestFile | None = None

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.watched}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            self._restore(number, handler)
        self._before = {}
        if self._file is not None and self._reason is not None:
            self._file.answer()

    def watch(self, run: Run) -> Callable[[], bool]:
        """Watches for a file STOP in a run's folder too; gives a function: is a stop requested?

        Where this rank writes, at most once a second. The file is removed when the run has stopped.
        """
        if run.writes_here:
            self._file = RequestFile(run.path / STOP_FILE, self._clock)
        return lambda: self.requested is not None

    @property
    def requested(self) -> str | None:
        """Why this process should save and stop, or None.

        A signal's name, "the launcher died" or "a file STOP".
        """
        if self._reason is None and os.getppid() != self._parent:
            self._reason = "the launcher died"
        if self._reason is None and self._file is not None and self._file.asked:
            self._reason = f"a file {STOP_FILE}"
        return self._reason

    def preempted(self, step: int) -> Preempted:
        """Gives the error that ends a run which has saved at `step`, with exit code 75."""
        return Preempted(
            f"asked to stop ({self.requested or 'on another rank'}); step {step} is saved",
            expected="the last step of the run",
            where=f"step {step}",
            action="launch the same command again: it goes on from here",
        )

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._reason is None:
            self._reason = signal.Signals(number).name
        if number != signal.SIGINT:
            return
        now = self._clock()
        if self._interrupted_at is None:
            self._interrupted_at = now
        elif now - self._interrupted_at >= INSISTENCE_SECONDS:
            self._restore(number, self._before[number])
            raise KeyboardInterrupt

    @staticmethod
    def _restore(number: int, handler: Any) -> None:
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
