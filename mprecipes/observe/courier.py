# SPDX-License-Identifier: Apache-2.0
"""Hands jobs to something slow on a thread of its own, so that whoever has jobs never waits.

The queue is bounded: a job that finds it full is lost and counted. A job that raises is counted
too, and the next one is tried. At the end everything is waited for, but only for so long. The
thread is a daemon: it never keeps a process alive.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Job = Callable[[T], object]


class Courier(Generic[T]):
    """One thread that opens a target and does jobs with it, in the order they came.

    Args:
        opened: gives the target; called once, on the thread. When it raises, every job is lost.
        capacity: jobs that may wait.
        on_error: told, on the thread, of every exception of `opened` and of jobs.

    Attributes:
        lost: jobs sent with `counted` that were dropped, raised, or were left at the end.
    """

    def __init__(
        self, opened: Callable[[], T], *, capacity: int, on_error: Callable[[BaseException], None]
    ) -> None:
        self.lost = 0
        self._opened, self._capacity, self._on_error = opened, capacity, on_error
        self._jobs: deque[tuple[Job[T] | None, bool]] = deque()
        self._doing: tuple[Job[T] | None, bool] | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def send(self, job: Job[T], *, counted: bool = True) -> None:
        """Leaves a job; never waits for the target.

        Args:
            counted: false for the rare job (an alert) that must find room and is no row.
        """
        with self._changed:
            if self._closed or (counted and len(self._jobs) >= self._capacity):
                self.lost += counted
                return
            self._jobs.append((job, counted))
            self._changed.notify()

    def close(
        self,
        last: Job[T],
        seconds: float,
        *,
        hurry: Callable[[], object] = lambda: None,
        grace_seconds: float = 0.0,
    ) -> bool:
        """Has `last` done after all others, and waits for it for at most `seconds`.

        When time runs out, `hurry` is called, which may end what the thread waits for, and
        `grace_seconds` more are given.

        Returns:
            False when that was not enough: what was left is lost, and the thread left to itself.
        """
        with self._changed:
            if self._closed:
                return True
            self._jobs += [(last, False), (None, False)]
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)
        if self._thread.is_alive():
            hurry()
            self._thread.join(grace_seconds)
        with self._changed:
            left = [*self._jobs, *([self._doing] if self._doing else [])]
            self._jobs.clear()
            self._doing = None
            self.lost += sum(counted for _, counted in left)
            return not left

    def _work(self) -> None:
        target: T | None = None
        try:
            target = self._opened()
        except BaseException as error:  # noqa: BLE001  whatever it is, the training goes on
            self._on_error(error)
        while (job := self._next()) is not None:
            try:
                if target is not None:
                    job(target)
            except BaseException as error:  # noqa: BLE001  clients raise CancelledError, too
                self._on_error(error)
                self._done(failed=True)
            else:
                self._done(failed=target is None)

    def _next(self) -> Job[T] | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs) or self._closed)
            job, counted = self._jobs.popleft() if self._jobs else (None, False)
            self._doing = None if job is None else (job, counted)
            return job

    def _done(self, failed: bool) -> None:
        with self._changed:
            if self._doing is not None:  # else it was given up meanwhile, and is counted
                self.lost += failed and self._doing[1]
                self._doing = None
