# SPDX-License-Identifier: Apache-2.0
"""Tensors to files: one writer per rank, hashed while written; small JSON files beside them.

On disk: `tensors-rank00000-000.safetensors`, -001, ... per rank, each a valid safetensors file of
at most 512 MiB unless one tensor alone is larger, since tensors are never cut; of about equal size
and at least eight where a rank writes much, so that they are hashed and read in parallel. Nothing
is ever pickled. `put` here and `loading.load` are the seam under which another engine may write and
read; what is a share, where it is published and when it can be trusted is decided above it.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import heapq
import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mprecipes.errors import VerificationError
from mprecipes.faults import fault_point

MAX_FILE_BYTES = 512 << 20
SUFFIX = ".safetensors"
_MANY_FILES, _FEW_BYTES = 8, 32 << 20  # so many files of a rank, unless they were that small
_CHUNK_BYTES = 16 << 20
_HASH_THREADS = 2  # on two processors one: the other one is the training's
ALIGNMENT = (
    4096  # of the memory, offsets and sizes of direct writes. Source: open(2), NOTES, O_DIRECT
)
_UNREACHABLE = {
    errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE,
    errno.ENOMEM, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOTCONN, errno.ECONNRESET,
    errno.ECONNABORTED, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
    errno.ENETUNREACH, errno.ENOLCK, errno.ESHUTDOWN,
}  # fmt: skip
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux only
_DIRECT_BYTES = 1 << 20  # files of less go through the page cache
_WRITE_BACK = 2  # Source: linux/fs.h, SYNC_FILE_RANGE_WRITE: start it, do not wait
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint, as its manifest lists it.

    Attributes:
        path: plain file name inside the checkpoint's folder.
        bytes: size.
        sha256: 64 lower-case hex digits.
        rank: the rank that wrote it.
    """

    path: str
    bytes: int
    sha256: str
    rank: int


def share_of(tensors: Mapping[str, torch.Tensor], *, rank: int, world_size: int) -> list[str]:
    """Gives the names of the tensors that `rank` writes: whole tensors, balanced by bytes.

    The same on every rank that passes the same names and sizes; each name falls to one rank.
    """
    return _shares({name: tensor.nbytes for name, tensor in tensors.items()}, world_size)[rank]


def _shares(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Largest first, each name to the share that is smallest then, the first one of equals."""
    shares: list[list[str]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]  # a heap
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, lightest = loads[0]
        shares[lightest].append(name)
        heapq.heapreplace(loads, (load + sizes[name], lightest))
    return shares


def files_of(
    tensors: Mapping[str, torch.Tensor], max_file_bytes: int = MAX_FILE_BYTES
) -> list[list[str]]:
    """Cuts names into the files `put` makes of them; in each, wide elements first: all aligned.

    Depends on names and sizes alone, not on their order.
    """
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    total = sum(sizes.values())
    count = max(1, min(_MANY_FILES, total // _FEW_BYTES))
    if total > count * max_file_bytes:
        count = _MANY_FILES * -(-total // (_MANY_FILES * max_file_bytes))
    count = max(count, sum(2 * size > max_file_bytes for size in sizes.values()))  # no two of these
    while True:
        files = [names for names in _shares(sizes, count) if names]
        if all(len(n) == 1 or sum(map(sizes.__getitem__, n)) <= max_file_bytes for n in files):
            break
        count += 1
    return [sorted(names, key=lambda name: (-tensors[name].itemsize, name)) for names in files]


def put(
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    *,
    rank: int,
    world_size: int,
    step: int | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[FileEntry]:
    """Writes this rank's share of `tensors` and blocks until it is on the disk.

    What is hashed is what is in memory, by helper threads while the files are written. Tensors that
    lie in memory as they lie in the file (`snapshot.HostBuffers`) are written in large pieces.

    Args:
        tensors: name -> tensor in host memory, which nobody changes until this returns.
        folder: the staging folder, which exists.
        rank: names the files.
        world_size: number of ranks that share `tensors`; 1 when they already are this rank's share.
        step: for fault points only.

    Raises:
        OSError: the disk refused; what was written so far stays in the staging folder.
    """
    if world_size > 1:
        mine = share_of(tensors, rank=rank, world_size=world_size)
        tensors = {name: tensors[name] for name in mine}
    kept, contents = [], []  # what is not contiguous is copied, and lives as long as it is read
    for names in files_of(tensors, max_file_bytes):
        kept.append([tensors[name].detach().contiguous() for name in names])
        contents.append([_header(names, kept[-1]), *_regions(kept[-1])])
    digests, todo = [""] * len(contents), deque(range(len(contents)))

    def hash_files() -> None:
        while todo:
            with contextlib.suppress(IndexError):  # the other thread took the last one
                number = todo.popleft()
                digests[number] = _sha256(contents[number])

    num_threads = max(1, min(_HASH_THREADS, len(os.sched_getaffinity(0)) - 1))
    files, helpers = [], ThreadPoolExecutor(num_threads, thread_name_prefix="mprecipes-hash")
    with contextlib.ExitStack() as opened:
        opened.callback(helpers.shutdown)
        opened.callback(todo.clear)
        hashing = [helpers.submit(hash_files) for _ in range(num_threads)]
        for number, buffers in enumerate(contents):
            fault_point("save.before_file", step)
            name = f"tensors-rank{rank:05d}-{number:03d}{SUFFIX}"
            file = opened.enter_context(open(folder / name, "xb", buffering=0))
            files.append((name, file, _write(file.fileno(), buffers, step)))
        for _, file, _ in files:
            fault_point("save.before_sync", step)
            os.fdatasync(file.fileno())
            fault_point("save.after_file", step)
        for future in hashing:
            future.result()
    return [FileEntry(name, size, sha, rank) for (name, _, size), sha in zip(files, digests)]


def put_json(value: Any, folder: Path, name: str, *, rank: int) -> FileEntry:
    """Writes one small JSON file as durably as the tensors."""
    return put_bytes(encode_json(value), folder, name, rank=rank)


def encode_json(value: Any) -> bytes:
    """Gives the bytes of a file of `put_json`."""
    return json.dumps(value, indent=1, allow_nan=False).encode("ascii") + b"\n"


def put_bytes(data: bytes, folder: Path, name: str, *, rank: int) -> FileEntry:
    """Writes one small file as durably as the tensors."""
    with open(folder / name, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest(), rank)


class DamagedFile(VerificationError):
    """A file of a checkpoint is not what its manifest says: an older checkpoint may be."""


class UnreachableFile(DamagedFile):
    """It could not be read, for a reason that is not its own: it may be as good as ever."""


def damaged(
    folder: Path,
    entry: FileEntry,
    found: str,
    expected: str,
    kind: type[DamagedFile] = DamagedFile,
) -> DamagedFile:
    """Gives the error for a file that is not what its entry says."""
    return kind(
        found,
        expected=f"{expected}, as when rank {entry.rank} wrote it",
        where=f"{folder.name}/{entry.path}",
        action="do not use this checkpoint; launch again and the newest one that verifies is taken",
    )


def is_unreachable(error: OSError) -> bool:
    """Whether a file could not be read because of the mount, its permissions or this process."""
    return error.errno in _UNREACHABLE


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Gives the memory of a contiguous tensor on the host, writable."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _header(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> memoryview:
    """The safetensors header. Source: github.com/huggingface/safetensors, README, "Format"."""
    fields, offset = {}, 0
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}, which a safetensors file cannot hold")
        end = offset + tensor.nbytes
        span = [offset, end]
        fields[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": span,
        }
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    unit = 8 if offset < _DIRECT_BYTES else ALIGNMENT  # the data begins where it can be direct
    text += b" " * (-(8 + len(text)) % unit)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _regions(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """The memory of contiguous tensors, neighbours in memory as one piece."""
    regions: list[list[int]] = []
    for tensor in tensors:
        if not tensor.nbytes:
            continue
        if regions and sum(regions[-1]) == tensor.data_ptr():
            regions[-1][1] += tensor.nbytes
        else:
            regions.append([tensor.data_ptr(), tensor.nbytes])
    return [memoryview((ctypes.c_ubyte * size).from_address(start)) for start, size in regions]


def _sha256(buffers: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def _write(descriptor: int, buffers: Sequence[memoryview], step: int | None) -> int:
    """Writes a new file; gives its size.

    What is aligned goes from memory to the disk past the page cache: that takes no processor time
    from the training, and leaves its cached data where it is. The rest goes through the cache, its
    pages on their way to the disk early.
    """
    size = 0
    for buffer in buffers:
        start = _write_direct(descriptor, buffer, size)
        size += start
        while start < len(buffer):
            count = os.write(descriptor, buffer[start : start + _CHUNK_BYTES])
            _start_write_back(descriptor, size, count)
            start, size = start + count, size + count
        fault_point("save.in_file", step)
    return size


def _write_direct(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Writes the aligned part of a large buffer; gives how much that was.

    Nothing where memory or offset are not aligned, and less than all where a file system does not
    take it: the rest is an ordinary write's, with its errors.
    """
    stop = len(buffer) - len(buffer) % ALIGNMENT
    address = np.frombuffer(buffer, np.uint8).ctypes.data if stop else 0
    if not _O_DIRECT or stop < _DIRECT_BYTES or offset % ALIGNMENT or address % ALIGNMENT:
        return 0
    done, flags = 0, fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
        while done < stop:
            done += os.write(descriptor, buffer[done : min(stop, done + _CHUNK_BYTES)])
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP):
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return done


def _start_write_back(descriptor: int, offset: int, count: int) -> None:
    """Only speed depends on it: what it cannot do, `fdatasync` does."""
    if (call := _sync_file_range()) is not None:
        call(descriptor, offset, count, _WRITE_BACK)


@functools.cache
def _sync_file_range() -> Any:
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        call = ctypes.CDLL(None).sync_file_range
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        return call
    return None
