# SPDX-License-Identifier: Apache-2.0
"""At most one save in flight: handed to a background thread, waited for, and told once.

What follows a save has a thread of its own, so that the next save does not wait for it: a milestone
of a large state is copied and read again for minutes, and the other ranks wait for no more than the
limit of a collective, a preemption not even that long.
"""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from mprecipes.checkpoint.background import background_thread
from mprecipes.checkpoint.grace import Grace
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.checkpoint.saving import LostPeers, SaveReport
from mprecipes.errors import NumericsError, RecipeError

log = logging.getLogger(__name__)
Outcome = tuple[SaveReport, RecipeError | None]


class Flight:
    """The saves of one rank in order, and what follows them in order, on a thread each.

    Attributes:
        last: report of the newest save that ended, None before the first.
        failure: error of the newest save that ended, None when it succeeded or was raised.
        fatal: an error after which the run should not go on, until it is raised.
        counts: `saves`, `kept_saves`, `failed_saves`, `waits` and `aftercare_errors`.
    """

    def __init__(self, policy: CheckpointPolicy, grace: Grace) -> None:
        self._grace = grace
        self._policy = policy
        self._saving = background_thread("mprecipes-save")
        self._following = background_thread("mprecipes-follow")
        self._save: Future[Outcome] | None = None
        self._others: list[Future[None]] = []
        self._ended: list[SaveReport] = []
        self._blocked = (0.0, 0.0)
        self.last: SaveReport | None = None
        self.failure: RecipeError | None = None
        self.fatal: RecipeError | None = None
        self.counts: Counter[str] = Counter()

    def begin(self, work: Callable[[], Outcome]) -> Future[Outcome]:
        """Starts a save when the one before was waited for."""
        assert self._save is None
        self.failure = None
        self._save = _submit(self._saving, work)
        return self._save

    def blocked(self, seconds: float, waited: float) -> None:
        """Notes how long the training thread stood still for the save that was begun."""
        self._blocked = (seconds, waited)

    def follow(self, work: Callable[[], None]) -> None:
        """Does something after all that follows already; its errors are counted and end nothing.

        Beside the saves: what needs one of them waits for its result.
        """

        def carefully() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - what was published is published
                self.counts["aftercare_errors"] += 1
                log.warning("after a save: %s; the run goes on", error)

        self._others = [future for future in self._others if not future.done()]
        self._others.append(_submit(self._following, carefully))

    def land(self) -> None:
        """Waits for the save in flight; counts it when there was something to wait for."""
        if self._save is not None:
            self.counts["waits"] += not self._save.done()
            self._save.result()
            self.collect()

    def settle(self) -> None:
        """Waits for everything that was begun."""
        if self._save is not None:
            self._save.result()
            self.collect()
        while self._others:
            self._others.pop(0).result()

    def collect(self) -> None:
        """Takes note of a save that has ended; never blocks."""
        if self._save is None or not self._save.done():
            return
        (report, error), self._save = self._save.result(), None
        seconds, waited = self._blocked
        report = replace(report, blocked_seconds=seconds, waited_seconds=waited)
        if error is None and not report.kept:
            report = replace(report, note=self._grace.measured(report.seconds))
        self.last, self.failure = report, error
        self._ended.append(report)
        self.counts["failed_saves" if error else "kept_saves" if report.kept else "saves"] += 1
        if error is not None:
            broken = isinstance(error, NumericsError | LostPeers)
            if broken or self._policy.on_save_failure == "stop":
                self.fatal = error
            log.warning("%s%s", error, "" if self.fatal else "\n  the run goes on")

    def ended(self) -> list[SaveReport]:
        """Gives the saves that ended since the last call; never blocks."""
        self.collect()
        ended, self._ended = self._ended, []
        return ended

    def told(self, error: RecipeError) -> RecipeError:
        """Gives an error that is now raised, and so not raised again."""
        self.fatal = self.failure = None
        return error

    def close(self) -> None:
        """Ends the threads; what is begun later is done by the caller's."""
        self.settle()
        self._saving.shutdown()
        self._following.shutdown()


def _submit(thread: ThreadPoolExecutor, work: Callable[[], Any]) -> Future[Any]:
    try:
        return thread.submit(work)
    except RuntimeError:  # closed, or no thread can be started; peers wait for this rank
        future: Future[Any] = Future()
        future.set_result(work())
        return future
