# SPDX-License-Identifier: Apache-2.0
"""Folders that are expensive to make: built aside, published whole, checked when opened.

On disk an entry is a folder named by a fingerprint, its files, and `manifest.json` with `facts`
and the bytes, SHA-256 and modification time of every file. It is built as `.building-...` beside
its place and renamed after fsync, so that a killed build leaves nothing under a name that is ever
opened. One builder at a time per entry (`flock`).
"""

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mprecipes.compute.ranks import Ranks
from mprecipes.errors import DataError, Preempted
from mprecipes.faults import fault_point
from mprecipes.identity.files import (
    canonical_json,
    fsync_directory,
    sha256_file,
    write_json_atomically,
)

MANIFEST = "manifest.json"
_POLL_SECONDS = 0.2
_HEARTBEAT_SECONDS = 2.0

T = TypeVar("T")


def default_cache_dir() -> Path:
    """Gives `$MPRECIPES_CACHE`, or `~/.cache/mprecipes`."""
    return Path(os.environ.get("MPRECIPES_CACHE") or "~/.cache/mprecipes").expanduser()


def fingerprint_of(value: Any) -> str:
    """Gives the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


@contextlib.contextmanager
def building(entry: Path, facts: dict[str, Any]) -> Iterator[Path]:
    """Gives an empty folder; when the block ends without an error it becomes `entry`, with `facts`.

    `facts` may be filled inside the block. The caller holds the entry's lock.

    Raises:
        DataError: the disk is full.
    """
    for leftover in entry.parent.glob(f".building-{entry.name}-*"):
        shutil.rmtree(leftover)
    folder = entry.with_name(f".building-{entry.name}-{uuid.uuid4().hex[:8]}")
    folder.mkdir(parents=True)
    try:
        yield folder
        fault_point("data.before_manifest")
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        manifest = {"schema": 1, "facts": facts, "files": [_describe(folder, p) for p in paths]}
        manifest["root_sha256"] = fingerprint_of(manifest)
        write_json_atomically(folder / MANIFEST, manifest)
        fault_point("data.before_publish")
        folder.rename(entry)
        fsync_directory(entry.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _unusable(entry.parent, error) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _describe(folder: Path, path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    fsync_directory(path.parent)
    stat = path.stat()
    return {
        "path": path.relative_to(folder).as_posix(),
        "bytes": stat.st_size,
        "sha256": sha256_file(path),
        "mtime_ns": stat.st_mtime_ns,
    }


def open_entry(entry: Path, *, verify: bool = False) -> dict[str, Any]:
    """Gives the facts of a published entry after checking its files.

    Sizes are always checked; SHA-256 where the modification time is not the recorded one (a copied
    cache), or everywhere with `verify`.

    Raises:
        DataError: the manifest or a file is not what was published.
    """
    try:
        manifest = json.loads((entry / MANIFEST).read_text())
        root = manifest.pop("root_sha256")
        files = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(entry / MANIFEST, f"no readable manifest ({error})", "a manifest") from error
    if fingerprint_of(manifest) != root:
        raise _damaged(entry / MANIFEST, "a manifest that is not its root_sha256", root)
    for file in files:
        _check(entry / file["path"], file, verify)
    return manifest["facts"]


def _check(path: Path, file: dict[str, Any], verify: bool) -> None:
    if not path.is_file():
        raise _damaged(path, "no file", f"{file['bytes']} bytes")
    stat = path.stat()
    if stat.st_size != file["bytes"]:
        raise _damaged(path, f"{stat.st_size} bytes", f"{file['bytes']} bytes")
    if not verify and stat.st_mtime_ns == file["mtime_ns"]:
        return
    if (found := sha256_file(path)) != file["sha256"]:
        raise _damaged(path, f"SHA-256 {found}", f"SHA-256 {file['sha256']}")
    with contextlib.suppress(PermissionError):  # spares the next start this check
        os.utime(path, ns=(stat.st_atime_ns, file["mtime_ns"]))


def _damaged(path: Path, found: str, expected: str) -> DataError:
    return DataError(
        found,
        expected=expected,
        where=str(path),
        action=f"delete the folder {path.parent}; the next launch prepares it again",
    )


def _unusable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"{type(error).__name__}: {error.strerror}",
        expected="a folder for prepared data that can be written, has room and knows file locks",
        where=str(folder),
        action="set MPRECIPES_CACHE to such a folder",
    )


@contextlib.contextmanager
def locked(entry: Path, *, wait_seconds: float, should_stop: Callable[[], bool]) -> Iterator[None]:
    """Holds the lock of an entry against other builders, also of other launches; blocks to get it.

    Raises:
        DataError: another process held it for `wait_seconds`; or there can be no lock there.
    """
    path = entry.with_name(f".lock-{entry.name}")
    deadline = time.monotonic() + wait_seconds
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab")  # noqa: SIM115 - closed below
    except OSError as error:
        raise _unusable(entry.parent, error) from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                stop_if_asked(should_stop)
            except OSError as error:
                raise _unusable(entry.parent, error) from error
            if time.monotonic() > deadline:
                raise DataError(
                    f"another process has been preparing this data for {wait_seconds:.0f} s",
                    expected="the other preparation to finish",
                    where=str(path),
                    action="wait for it and launch again, or end the process that holds this file",
                )
            time.sleep(_POLL_SECONDS)
        yield


def stop_if_asked(should_stop: Callable[[], bool]) -> None:
    """Raises Preempted when a stop was asked for; what is being built is dropped."""
    if should_stop():
        raise Preempted(
            "the run was asked to stop before its data was prepared",
            expected="time to prepare the data",
            where="preparing data",
            action="launch the same command again; the preparation starts anew",
        )


def on_main(ranks: Ranks, work: Callable[[], T], wait_seconds: float, ended: threading.Event) -> T:
    """Collective: runs `work` where this rank writes, and gives its value, or raises its error.

    That is rank 0 for all, or the first rank of each node for its node. With peers it runs in a
    thread, while short collectives keep every rank inside the time limit of the process group
    however long it takes.
    """
    if ranks.world_size == 1:
        return work()
    deadline = time.monotonic() + wait_seconds
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(work) if ranks.writes_here else None
        state = "working"
        while state == "working":
            if future is not None:
                left = max(0.0, deadline - time.monotonic())
                concurrent.futures.wait([future], timeout=min(left, _HEARTBEAT_SECONDS))
                late = time.monotonic() > deadline
                state = "done" if future.done() else "late" if late else "working"
            states = ranks.gather(state)
            told = [states[rank] for rank in ranks.writers]
            state = "late" if "late" in told else "working" if "working" in told else "done"
        if state == "late":
            ended.set()
            late_rank = ranks.writers[told.index("late")]
            raise DataError(
                f"rank {late_rank} has been preparing the data for {wait_seconds:.0f} s",
                expected="the data to be prepared within this time",
                where=f"rank {ranks.rank}",
                action="prepare it first with one process, which fills the same cache",
            )
        error = future.exception() if future is not None else None
        value = future.result() if future is not None and error is None else None
        return ranks.writers_first(error, value)
