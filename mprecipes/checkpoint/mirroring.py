# SPDX-License-Identifier: Apache-2.0
"""The mirror kept up to date by a background thread that never stops a training.

What is missing there is found out by comparing, never remembered, so that a copy a dead process
left unfinished is made up for by the next one. Whatever fails is counted, logged, tried again with
growing pauses, and once more after the next save. The thread is a daemon that nothing joins when
the process ends: a copy that is cut off is no checkpoint at the mirror.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from mprecipes.checkpoint.abandoned import Cut, abandoned_roots
from mprecipes.checkpoint.manifest import Manifest
from mprecipes.checkpoint.mirror import Mirror, Mirrored, foreign
from mprecipes.errors import ConfigError

log = logging.getLogger(__name__)
PAUSES = (1.0, 5.0, 25.0)
STOP_SECONDS = 1.0
Roots = Mapping[tuple[str, str], str | None]
Copy = tuple[str, str, Manifest]


class Stopped(Exception):
    """The thread was asked to give up what it is doing."""


class Mirroring:
    """Copies what is wanted to the mirror, and deletes what retention gives up there.

    Args:
        next_copy: given (kind, name) -> root digest of what is there, gives what to copy next, and
            keeps it from being deleted until it is called again; None when nothing is missing.
        surplus: of the rolling checkpoints there, gives those to delete.
        cuts: gives the branches this run gave up, and the checkpoints on the local disk.
        earlier: gives the ids of the runs whose checkpoints lie on the local disk.
        pauses: seconds before each further try.

    Attributes:
        counts: `mirrored`, `mirror_bytes`, `mirror_deleted`, `mirror_errors`, `mirror_skipped` (it
            was deleted here before it was copied).
    """

    def __init__(
        self,
        mirror: Mirror,
        run_id: str,
        *,
        next_copy: Callable[[Roots], Copy | None],
        surplus: Callable[[Sequence[Mirrored]], list[Mirrored]],
        earlier: Callable[[], set[str]],
        cuts: Callable[[], tuple[list[Cut], list[Manifest]]] = lambda: ([], []),
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        self._mirror, self._run_id, self._pauses = mirror, run_id, pauses
        self._next_copy, self._surplus, self._earlier = next_copy, surplus, earlier
        self._cuts = cuts
        self.counts: Counter[str] = Counter()
        self._wake, self._stop, self._last = threading.Event(), threading.Event(), False
        self._busy = False
        self._off: ConfigError | None = None
        self._thread = threading.Thread(target=self._run, name="mprecipes-mirror", daemon=True)

    @property
    def is_idle(self) -> bool:
        """True when nothing is being copied and nothing was asked for."""
        return not self._busy and not self._wake.is_set()

    def wake(self) -> None:
        """Has the mirror brought up to date soon; returns at once."""
        if not self._thread.is_alive() and not self._stop.is_set():
            self._thread.start()
        self._wake.set()

    def close(self, *, drain: bool, seconds: float) -> None:
        """Ends the thread after one more round, or without `drain` as soon as it can.

        Waits at most `seconds`, without `drain` at most one: a file that is being sent cannot be
        interrupted, and the process may end meanwhile. What was cut off has no manifest there, so
        it is no checkpoint, and the next launch goes on with it.
        """
        if not self._thread.is_alive():
            return
        self._last = True
        if not drain:
            self._stop.set()
        self._wake.set()
        self._thread.join(seconds if drain else min(seconds, STOP_SECONDS))
        if not self._thread.is_alive():
            return
        if not drain:
            log.info("%s: a copy is cut off; the next launch goes on with it", self._mirror.home)
        else:
            self._stop.set()
            self.counts["mirror_errors"] += 1
            log.warning(
                "%s: not up to date after %.0f s; left as it is", self._mirror.home, seconds
            )

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._busy = True
            self._wake.clear()
            last = self._last
            try:
                self._try()
            except Stopped:
                return
            finally:
                self._busy = False
            if last:
                return

    def _try(self) -> None:
        for pause in (*self._pauses, None):
            try:
                return self.update()
            except Stopped:
                raise
            except ConfigError as error:  # another run's: never write there again
                if self._off is None:
                    log.error("the mirror is not used: %s", error)
                    self.counts["mirror_errors"] += 1
                self._off = error
                return None
            except Exception as error:  # noqa: BLE001 - file systems raise what they like
                self.counts["mirror_errors"] += 1
                again = "after the next save" if pause is None else f"in {pause:.0f} s"
                text = f"{type(error).__name__}: {error}"
                log.warning("%s: %s; next try %s", self._mirror.home, text, again)
                if pause is not None and self._stop.wait(pause):
                    raise Stopped from None
        return None

    def update(self) -> None:
        """Copies all that is missing, newest first, then deletes what is too much there.

        Before each copy the mirror takes note of what was abandoned here meanwhile.

        Raises:
            ConfigError: another run writes there.
        """
        if self._off is not None:
            return
        self._own()
        there = {(each.kind, each.name): each for each in self._mirror.published()}
        roots = {
            key: each.manifest.root_sha256 if each.manifest else None for key, each in there.items()
        }
        while True:
            self._own()
            abandoned = self._abandon(each.manifest for each in there.values() if each.manifest)
            if (copy := self._next_copy(roots)) is None:
                break
            self._go_on(0)
            kind, name, manifest = copy
            try:
                self.counts["mirror_bytes"] += self._mirror.push(manifest, kind, name, self._go_on)
            except FileNotFoundError:
                if manifest.folder.exists():
                    raise
                self.counts["mirror_skipped"] += 1
                continue
            roots[kind, name] = manifest.root_sha256
            there[kind, name] = Mirrored(kind, name, manifest)
            self.counts["mirrored"] += 1
        rolling = [
            replace(each, abandoned=each.manifest.root_sha256 in abandoned)
            for each in there.values()
            if each.kind == "checkpoints" and each.manifest
        ]
        for each in self._surplus(rolling):
            self._go_on(0)
            self._own()
            self._mirror.delete(each)
            self.counts["mirror_deleted"] += 1

    def _abandon(self, there: Iterable[Manifest]) -> frozenset[str]:
        """Gives the root digests that are abandoned there, written down there first."""
        cuts, here = self._cuts()
        known, noted = self._mirror.abandoned()
        roots = abandoned_roots(cuts, there, known=known, noted=noted, here=here)
        ids = noted | {cut.id for cut in cuts}
        if (roots, ids) != (known, noted):
            self._mirror.abandon(roots, ids)
        return roots

    def _own(self) -> None:
        """Makes sure that this run is the one that writes there."""
        owner = self._mirror.owner()
        if owner is not None and owner["writer"] == self._run_id:
            return
        if owner is not None and owner["writer"] not in self._earlier():
            raise foreign(self._mirror, owner, self._run_id)
        self._mirror.claim(self._run_id, self._earlier())

    def _go_on(self, _num_bytes: int) -> None:
        if self._stop.is_set():
            raise Stopped
