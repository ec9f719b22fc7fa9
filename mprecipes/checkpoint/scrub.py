# SPDX-License-Identifier: Apache-2.0
"""Everything that is kept, read again and hashed now and then: milestones and mirror included.

Bytes that nobody reads rot unseen. The background scrubber reads at a low, fixed rate, on a thread
of the lowest priority, and from the disk rather than from the page cache. It deletes and moves
nothing: what does not verify is warned about, counted, and left to the next start.

On disk: `reports/scrub.json`: `time` (unix seconds) of the last round, `checked`, `bytes`,
`seconds` and `problems`.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mprecipes.checkpoint.manifest import (
    NAME,
    Problem,
    files_of,
    read_manifest,
    verify_folder,
)
from mprecipes.checkpoint.mirror import Mirror
from mprecipes.errors import VerificationError
from mprecipes.identity.files import write_json_atomically

log = logging.getLogger(__name__)
BYTES_PER_SECOND = 100e6
CHUNK_BYTES = 1 << 20
KINDS = {"checkpoints": "checkpoint", "milestones": "milestone"}


@dataclass(frozen=True)
class Finding:
    """What was found about one kept checkpoint.

    Attributes:
        kind: "checkpoint", "milestone", "mirrored checkpoint", "mirrored milestone" or "mirror".
        place: of its folder in the run folder; at the mirror its URL.
        step: from its manifest; None when that cannot be read.
        num_bytes: that its manifest promises.
        problems: what does not agree, empty when everything does.
    """

    kind: str
    place: str
    step: int | None
    num_files: int
    num_bytes: int
    seconds: float
    problems: list[Problem]


class Stopped(Exception):
    """The scrubber was asked to end."""


class Pace:
    """Keeps reading at a rate; raises `Stopped` as soon as the event is set."""

    def __init__(
        self,
        stop: threading.Event,
        bytes_per_second: float = BYTES_PER_SECOND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stop, self._rate, self._clock = stop, bytes_per_second, clock
        self._free_at = clock()

    def __call__(self, num_bytes: int) -> None:
        """Waits until `num_bytes` more may have been read."""
        self._free_at = max(self._free_at, self._clock() - 1.0) + num_bytes / self._rate
        if self._stop.wait(max(0.0, self._free_at - self._clock())):
            raise Stopped

    def digest(self, path: Path) -> str:
        """Gives the SHA-256 of a file as the disk holds it, where the system allows that."""
        digest, chunk = hashlib.sha256(), bytearray(CHUNK_BYTES)
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while count := file.readinto(chunk):
                digest.update(memoryview(chunk)[:count])
                self(count)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return digest.hexdigest()


def scrub(run: Path, mirror: Mirror | None, pace: Pace | None = None) -> Iterator[Finding]:
    """Verifies every checkpoint and milestone of a run folder, then of its mirror, one by one.

    Staging folders and quarantine are not among them. A checkpoint that retention deletes meanwhile
    is passed over.

    Args:
        pace: reads slowly; None for as fast as it goes.
    """
    for parent, kind in KINDS.items():
        for folder in sorted((run / parent).glob("[!.]*")):
            if folder.is_dir() and (found := verify_local(folder, kind, pace)) is not None:
                yield found
    if mirror is not None:
        yield from scrub_mirror(mirror, pace or _at_once)


def verify_local(folder: Path, kind: str, pace: Pace | None = None) -> Finding | None:
    """Verifies one folder; None when it is gone afterwards."""
    began, step, files, num_bytes = time.monotonic(), None, 0, 0
    with contextlib.suppress(VerificationError):  # the problems will say so
        manifest = read_manifest(folder)
        entries = files_of(manifest)
        step, files = manifest.step, len(entries) + 1
        num_bytes = sum(entry.bytes for entry in entries)
    try:
        problems = verify_folder(folder, pace.digest) if pace else verify_folder(folder)
    except FileNotFoundError:
        problems = [Problem(NAME, "missing", "a checkpoint")]
    if problems and not folder.exists():
        return None
    place, seconds = f"{folder.parent.name}/{folder.name}", time.monotonic() - began
    return Finding(kind, place, step, files, num_bytes, seconds, problems)


def _at_once(num_bytes: int) -> None:
    """Reads without pauses."""


def scrub_mirror(mirror: Mirror, go_on: Callable[[int], None] = _at_once) -> Iterator[Finding]:
    """Verifies everything at the mirror; one that does not answer is a finding too."""
    began = time.monotonic()
    try:
        for there in mirror.published():
            began = time.monotonic()
            kind, manifest = f"mirrored {KINDS[there.kind]}", there.manifest
            problems = mirror.verify(there, go_on)
            entries = files_of(manifest) if manifest else []
            yield Finding(
                kind, f"{mirror.home}/{there.place}", manifest.step if manifest else None,
                len(entries) + 1, sum(entry.bytes for entry in entries),
                time.monotonic() - began, problems,
            )  # fmt: skip
    except Stopped:
        raise
    except Exception as error:  # noqa: BLE001 - file systems raise what they like
        problem = Problem("", f"{type(error).__name__}: {error}", "a mirror that answers")
        yield Finding("mirror", mirror.home, None, 0, 0, time.monotonic() - began, [problem])


class Scrubber:
    """Scrubs a run every so many hours, counted over restarts, until it is closed.

    Args:
        run: the run's folder.
        hours: between the starts of two rounds.
        mirror: the run's mirror, if it has one.
        damaged: told the step of a rolling checkpoint that does not verify.

    Attributes:
        counts: `scrubs`, `scrubbed` (checkpoints), `scrub_problems`.
    """

    def __init__(
        self,
        run: Path,
        hours: float,
        mirror: Mirror | None,
        damaged: Callable[[int], None],
        *,
        bytes_per_second: float = BYTES_PER_SECOND,
    ) -> None:
        self._run, self._hours, self._mirror, self._damaged = run, hours, mirror, damaged
        self._rate, self._stop = bytes_per_second, threading.Event()
        self._report = run / "reports" / "scrub.json"
        self.counts: Counter[str] = Counter()
        self.is_idle = True
        self._thread = threading.Thread(target=self._loop, name="mprecipes-scrub", daemon=True)

    def start(self) -> None:
        """Starts the thread; a second call changes nothing."""
        if not self._thread.is_alive() and not self._stop.is_set():
            self._thread.start()

    def close(self) -> None:
        """Ends the thread after the chunk it reads."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        with contextlib.suppress(OSError):
            # Source: setpriority(2), NOTES: on Linux the nice value is a thread's own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            while not self._stop.wait(self._seconds_left()):
                self.is_idle = False
                self.round()
                self.is_idle = True
        except Stopped:
            pass
        except OSError as error:
            self.counts["scrub_problems"] += 1
            log.warning("the scrubber ends: %s", error)
        finally:
            self.is_idle = True

    def round(self) -> list[Finding]:
        """Scrubs everything once, slowly, and reports it."""
        began, findings = time.monotonic(), []
        for found in scrub(self._run, self._mirror, Pace(self._stop, self._rate)):
            findings.append(found)
            self.counts["scrubbed"] += 1
            if not found.problems:
                continue
            self.counts["scrub_problems"] += 1
            text = "; ".join(map(str, found.problems))
            log.warning("%s does not verify any more: %s", found.place, text)
            is_damaged = not all(problem.unreachable for problem in found.problems)
            if found.kind == "checkpoint" and found.step is not None and is_damaged:
                self._damaged(found.step)
        self.counts["scrubs"] += 1
        problems = [
            {"place": found.place, **asdict(problem)}
            for found in findings
            for problem in found.problems
        ]
        num_bytes = sum(found.num_bytes for found in findings)
        seconds = round(time.monotonic() - began, 3)
        self._write(
            {"checked": len(findings), "bytes": num_bytes, "seconds": seconds, "problems": problems}
        )
        return findings

    def _seconds_left(self) -> float:
        """Until the next round; the first one of a run comes `hours` after its first start."""
        try:
            last = float(json.loads(self._report.read_text(encoding="utf-8"))["time"])
        except (OSError, ValueError, TypeError, KeyError):
            last = time.time()
            self._write({"checked": 0, "bytes": 0, "seconds": 0.0, "problems": []})
        return max(0.0, last + 3600 * self._hours - time.time())

    def _write(self, facts: dict[str, Any]) -> None:
        self._report.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(self._report, {"time": time.time(), **facts})
