# SPDX-License-Identifier: Apache-2.0
"""The weights of a checkpoint as flat pieces, verified while they are read.

Every byte of every file is read once and hashed, several files at a time; optimizer state is read
past. Memory is one chunk a thread, whatever the size of a tensor or of the checkpoint. A piece says
which values of the flattened parameter it holds, so a parameter may come in any number of pieces,
in any order, from any files: whole tensors and shards look alike to who reads them.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from mprecipes.checkpoint.fragments import fragment_of
from mprecipes.checkpoint.headers import Header, opened, read_headers
from mprecipes.checkpoint.manifest import Manifest
from mprecipes.checkpoint.storage import FileEntry, bytes_of, damaged

CHUNK_BYTES, READERS = 2 << 20, 4
PREFIX = "weights/"


@dataclass(frozen=True)
class Piece:
    """A run of neighbouring values of one parameter.

    Attributes:
        name: of the parameter, as in the manifest's `params`.
        start: number of the first value in the flattened parameter.
        values: one-dimensional, in host memory that the next piece overwrites.
    """

    name: str
    start: int
    values: torch.Tensor


def each_piece(
    manifest: Manifest,
    work: Callable[[Piece], None],
    *,
    readers: int = READERS,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Calls `work` once with every value of every parameter, from several threads; blocks.

    What came from a file may be used for good only when this has returned: a file is compared with
    its entry after its last piece.

    Args:
        work: of pieces of different files at the same time; its error ends the reading.

    Raises:
        DamagedFile: a file is not what its entry says.
    """
    folder, stopped = manifest.folder, threading.Event()
    headers = {header.entry.path: header for header in read_headers(folder, manifest.files)}

    def read(entry: FileEntry) -> None:
        buffer = torch.empty(chunk_bytes, dtype=torch.uint8)
        for piece in _pieces_of(folder, entry, headers.get(entry.path), buffer):
            if stopped.is_set():
                return
            work(piece)

    order = sorted(manifest.files, key=lambda entry: -entry.bytes)
    with ThreadPoolExecutor(readers, thread_name_prefix="mprecipes-weights") as pool:
        tasks = [pool.submit(read, entry) for entry in order]
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            stopped.set()
            raise


def _pieces_of(
    folder: Path, entry: FileEntry, header: Header | None, buffer: torch.Tensor
) -> Iterator[Piece]:
    text = header.text if header is not None else b""
    digest, offset = hashlib.sha256(text), len(text)
    other = torch.empty(entry.bytes, dtype=torch.uint8, device="meta")
    spans = [("", other)]  # of another kind: read and hashed, nothing else
    if header is not None:
        spans = list(header.tensors.items())
    with opened(folder, entry) as descriptor:
        for name, like in spans:
            place, done, dtype = _place(name, like), 0, like.dtype
            while done < like.nbytes:
                part = buffer[: min(buffer.numel(), like.nbytes - done)]
                _fill(folder, entry, descriptor, bytes_of(part), offset)
                digest.update(bytes_of(part))
                if place is not None:
                    parameter, first = place
                    yield Piece(parameter, first + done // dtype.itemsize, part.view(dtype))
                done, offset = done + len(part), offset + len(part)
    if (found := digest.hexdigest()) != entry.sha256:
        raise damaged(folder, entry, f"sha256 {found}", f"sha256 {entry.sha256}")


def _place(name: str, like: torch.Tensor) -> tuple[str, int] | None:
    """The parameter a stored tensor belongs to and the number of its first value; None of others.

    The one place that knows how weights are named in files: a whole parameter by its name, a rank's
    own part of one as `NAME[START:STOP of ROWSxCOLUMNS]`.
    """
    if not name.startswith(PREFIX):
        return None
    fragment = fragment_of(name, like)
    return fragment.name.removeprefix(PREFIX), fragment.start


def _fill(folder: Path, entry: FileEntry, descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise damaged(folder, entry, f"{offset} bytes", f"{entry.bytes} bytes")
        view, offset = view[count:], offset + count
