# SPDX-License-Identifier: Apache-2.0
"""What the safetensors files of a checkpoint say they hold, before any memory is touched."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mprecipes.checkpoint.contents import MAX_HEADER_BYTES
from mprecipes.checkpoint.storage import (
    DTYPES,
    SUFFIX,
    DamagedFile,
    FileEntry,
    UnreachableFile,
    damaged,
    is_unreachable,
)

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Header:
    """What a safetensors file says it holds, in the order of its bytes.

    Attributes:
        text: its bytes as they were read, which `load` hashes instead of reading them again.
        tensors: name -> tensor of that shape and dtype without memory (device "meta").
    """

    entry: FileEntry
    text: bytes
    tensors: dict[str, torch.Tensor]


def read_headers(folder: Path, entries: Sequence[FileEntry]) -> list[Header]:
    """Reads what the safetensors files among `entries` say they hold; hashes nothing yet.

    Raises:
        DamagedFile: a file is no safetensors file of its entry's size, or a tensor is in two files.
    """
    headers: list[Header] = []
    names: set[str] = set()
    for entry in entries:
        if entry.path.endswith(SUFFIX):
            headers.append(_read_header(folder, entry))
            if doubled := sorted(names & headers[-1].tensors.keys()):
                found = f"tensors of another file again: {', '.join(doubled)}"
                raise damaged(folder, entry, found, "each once")
            names |= headers[-1].tensors.keys()
    return headers


@contextlib.contextmanager
def opened(folder: Path, entry: FileEntry) -> Iterator[int]:
    """The descriptor of a file of the entry's size.

    Raises:
        DamagedFile: it has another size or cannot be read.
        UnreachableFile: it cannot be read, and that is not the file's fault.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(folder / entry.path, flags)
        try:
            if (size := os.fstat(descriptor).st_size) != entry.bytes:
                raise damaged(folder, entry, f"{size} bytes", f"{entry.bytes} bytes")
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        found = f"unreadable ({error.strerror})"
        kind = UnreachableFile if is_unreachable(error) else DamagedFile
        raise damaged(folder, entry, found, f"{entry.bytes} bytes", kind) from error


def _read_header(folder: Path, entry: FileEntry) -> Header:
    """Source: github.com/huggingface/safetensors, README, "Format"."""
    with opened(folder, entry) as descriptor:
        size = os.pread(descriptor, 8, 0)
        count = int.from_bytes(size, "little")
        room = min(entry.bytes - 8, MAX_HEADER_BYTES)
        text = os.pread(descriptor, count, 8) if len(size) == 8 and count <= room else b""
    try:
        tensors = _parse(text, entry.bytes - 8 - len(text))
    except (ValueError, KeyError, TypeError, RecursionError, RuntimeError) as error:
        raise damaged(folder, entry, f"not a safetensors file ({error})", "one") from error
    return Header(entry, size + text, tensors)


def _parse(text: bytes, data_bytes: int) -> dict[str, torch.Tensor]:
    """Strict: the tensors cover the data in the order of the header, without gap or overlap."""
    fields = json.loads(text)
    fields.pop("__metadata__", None)
    tensors, offset = {}, 0
    for name, about in fields.items():
        if not all(type(length) is int and length >= 0 for length in about["shape"]):
            raise ValueError(f"{name} has shape {about['shape']}")
        tensor = torch.empty(about["shape"], dtype=_DTYPES[about["dtype"]], device="meta")
        if about["data_offsets"] != [offset, offset + tensor.nbytes]:
            raise ValueError(f"{name} lies at {about['data_offsets']}")
        tensors[name], offset = tensor, offset + tensor.nbytes
    if offset != data_bytes:
        raise ValueError(f"{offset} bytes of tensors in {data_bytes} bytes")
    return tensors
