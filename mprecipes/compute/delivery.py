# SPDX-License-Identifier: Apache-2.0
"""Files from the disk of one node to the disks of others, over a process group of their writers.

All writers of a launch pass the same list and take part in every file, so what goes wrong on one of
them is kept until the end: the others never wait for a part that does not come.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mprecipes.faults import fault_point
from mprecipes.identity.files import Parcel, fsync_directory

PART_BYTES = 8 << 20


def spread(
    rank: int, group: Any, parcels: Sequence[Parcel], place: Callable[[str], Path]
) -> dict[str, str]:
    """Collective among writers: sends every parcel; blocks until what this rank takes is durable.

    A file appears whole or not at all, and replaces one of its name.

    Args:
        group: host process group of all writers.
        parcels: the same, in the same order, on every writer.
        place: where a parcel's path lies on this node's disk; its folder exists.

    Returns:
        The SHA-256 of what this rank took, by path: of the bytes as they arrived.

    Raises:
        OSError: this rank could not read or write one; the others were sent all the same.
    """
    memory = torch.empty(PART_BYTES, dtype=torch.uint8)
    digests: dict[str, str] = {}
    disk = _Disk()
    for parcel in parcels:
        reads, takes = rank == parcel.source, rank in parcel.takers
        path, digest = place(parcel.path), hashlib.sha256()
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with contextlib.ExitStack() as opened:
            if reads:
                disk.open(opened, path, "rb")
            elif takes:
                disk.open(opened, temporary, "wb")
            for start in range(0, parcel.bytes, PART_BYTES):
                part = memory[: min(PART_BYTES, parcel.bytes - start)]
                if reads:
                    disk.read(part)
                dist.broadcast(part, src=parcel.source, group=group)
                if takes:
                    digest.update(_bytes(part))
                    disk.write(part)
            if takes:
                disk.sync()
        if takes:
            disk.replace(temporary, path)
            digests[parcel.path] = digest.hexdigest()
    if disk.problem is not None:
        raise disk.problem
    return digests


class _Disk:
    """One file at a time; after the first problem it does nothing more.

    Attributes:
        problem: what went wrong first.
    """

    def __init__(self) -> None:
        self.problem: OSError | None = None
        self._file: Any = None

    def open(self, stack: contextlib.ExitStack, path: Path, mode: str) -> None:
        self._file = self._try(lambda: stack.enter_context(path.open(mode, buffering=0)))

    def read(self, part: torch.Tensor) -> None:
        self._try(lambda: self._fill(_bytes(part)))

    def write(self, part: torch.Tensor) -> None:
        self._try(lambda: self._empty(_bytes(part)))

    def sync(self) -> None:
        self._try(lambda: os.fsync(self._file.fileno()))

    def replace(self, temporary: Path, path: Path) -> None:
        def work() -> None:
            os.replace(temporary, path)
            fsync_directory(path.parent)

        self._try(work)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)

    def _fill(self, view: memoryview) -> None:
        fault_point("exchange.in_file")
        while view:
            if not (count := self._file.readinto(view)):
                raise OSError(f"{Path(self._file.name).name} became shorter while it was sent")
            view = view[count:]

    def _empty(self, view: memoryview) -> None:
        fault_point("exchange.in_file")
        while view:
            view = view[self._file.write(view) :]

    def _try(self, work: Callable[[], Any]) -> Any:
        if self.problem is None:
            try:
                return work()
            except OSError as error:
                self.problem = error
        return None


def _bytes(part: torch.Tensor) -> memoryview:
    return memoryview(part.numpy())  # type: ignore[arg-type]
