# SPDX-License-Identifier: Apache-2.0
"""Small files that are either whole or absent, and one canonical text for what is digested."""

import contextlib
import hashlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mprecipes.faults import fault_point


@dataclass(frozen=True)
class Parcel:
    """A file that one node has and others lack (`compute/delivery.py`).

    Attributes:
        path: its name on every node.
        bytes: its size on the source.
        source: rank of the writer that reads it.
        takers: ranks of the writers that write it.
    """

    path: str
    bytes: int
    source: int
    takers: frozenset[int]


def canonical_json(value: Any) -> bytes:
    """Gives the one JSON text of a value: sorted keys, no spaces, ASCII; no NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces `path` with `data`: temporary file, fsync, `os.replace`, fsync of the folder.

    On disk afterwards: the old content or the new, never a part of either. Blocks for two fsyncs.
    Several may write one path: on a shared disk also processes of other machines with equal ids.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fault_point("files.before_replace")
        os.replace(temporary, path)
        fault_point("files.after_replace")
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Removes what `write_atomically` left in a folder when its process was killed.

    For the one process that writes there; a folder that is absent or cannot be written is left.
    """
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            path.unlink()


def write_json_atomically(path: Path, value: Any) -> None:
    """Writes an indented JSON file through `write_atomically`."""
    write_atomically(path, (json.dumps(value, indent=2) + "\n").encode("utf-8"))


def fsync_file(path: Path) -> None:
    """Makes the bytes of a file that something else wrote durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Makes renames and new names inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """Gives the SHA-256 of a file's bytes as 64 lower-case hex digits."""
    digest, chunk = hashlib.sha256(), bytearray(1 << 20)
    view = memoryview(chunk)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(view[:count])
    return digest.hexdigest()
