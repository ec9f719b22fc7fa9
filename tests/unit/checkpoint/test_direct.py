# SPDX-License-Identifier: Apache-2.0
"""Large files go from memory to the disk past the page cache, and the bytes are the same."""

import errno
import fcntl
import hashlib
import os

import pytest
import torch

from mprecipes.checkpoint import storage
from mprecipes.checkpoint.loading import get
from mprecipes.checkpoint.snapshot import HostBuffers
from mprecipes.checkpoint.storage import ALIGNMENT, put

STATE = {
    "weights/a": torch.arange(700_001, dtype=torch.float32),  # does not end on a block
    "weights/b": torch.arange(300_003, dtype=torch.float32).to(torch.bfloat16),
    "optimizer/a/step": torch.tensor(3.0),
}
NUM_BYTES = sum(tensor.nbytes for tensor in STATE.values())


class Disk:
    """Writes like `os.write`, notes size and kind of each write, and refuses some.

    Attributes:
        writes: (bytes, direct) per call that was made.
    """

    def __init__(self, refuse=(), number=0, short=None):
        self.writes, self._write = [], os.write
        self._refuse, self._number, self._short = refuse, number, short

    def __call__(self, descriptor, data):
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        call = len([True for _, kind in self.writes if kind])
        if direct and call in self._refuse:
            raise OSError(self._number, os.strerror(self._number))
        data = data[: self._short] if direct and self._short else data
        self.writes.append((len(data), direct))
        return self._write(descriptor, data)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the state onto a disk; gives its entry when all bytes are what the cache's are."""

    def run(disk, tensors=None):
        (tmp_path / "plain").mkdir()
        plain = put(STATE, tmp_path / "plain", rank=0, world_size=1)
        monkeypatch.setattr(storage.os, "write", disk)
        tensors = HostBuffers().copy(STATE) if tensors is None else tensors
        entries = put(tensors, tmp_path, rank=0, world_size=1)
        assert entries == plain
        (entry,) = entries
        data = (tmp_path / entry.path).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry.bytes, entry.sha256)
        back = get(tmp_path, entries)
        assert all(torch.equal(back[name], STATE[name]) for name in STATE)
        return entry

    return run


def split(writes):
    """Bytes that went directly, and through the cache."""
    return tuple(sum(size for size, direct in writes if direct is kind) for kind in (True, False))


def test_all_but_the_ends_goes_directly(write):
    """The header takes whole blocks, the data whole blocks directly, its last bytes the cache."""
    disk = Disk()
    entry = write(disk)
    tail = NUM_BYTES % ALIGNMENT
    assert tail
    header = entry.bytes - NUM_BYTES
    assert header % ALIGNMENT == 0
    assert split(disk.writes) == (NUM_BYTES - tail, header + tail)


def test_memory_of_others_is_written_all_the_same(write):
    """What does not lie on a block in memory goes through the cache."""
    memory = torch.empty(NUM_BYTES + 2 * ALIGNMENT, dtype=torch.uint8)
    start = -memory.data_ptr() % ALIGNMENT + 64
    tensors = {}
    for name, tensor in STATE.items():
        flat = tensor.reshape(-1).view(torch.uint8)
        start += -start % 64
        memory[start : start + tensor.nbytes] = flat
        view = memory[start : start + tensor.nbytes].view(tensor.dtype)
        tensors[name], start = view.view(tensor.shape), start + tensor.nbytes
    disk = Disk()
    write(disk, tensors)
    assert split(disk.writes)[0] == 0


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP])
@pytest.mark.parametrize("call", [0, 2])
def test_a_file_system_that_does_not_take_it_gets_the_rest_otherwise(write, number, call):
    """From the first write on, or from a later one: nothing is written twice or left out."""
    disk = Disk(refuse=[call], number=number, short=1 << 20)
    write(disk)
    assert split(disk.writes)[0] == call << 20


def test_short_writes_go_on_where_they_ended(write):
    """A write may take less than it was given."""
    disk = Disk(short=512 << 10)
    write(disk)
    assert len([True for _, direct in disk.writes if direct]) > 5


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_is_not_tried_otherwise(tmp_path, monkeypatch, number):
    """The error is the caller's, at once."""
    disk = Disk(refuse=[1], number=number, short=1 << 20)
    monkeypatch.setattr(storage.os, "write", disk)
    with pytest.raises(OSError, match=os.strerror(number)) as error:
        put(HostBuffers().copy(STATE), tmp_path, rank=0, world_size=1)
    assert error.value.errno == number
    assert split(disk.writes)[0] == 1 << 20


def test_small_files_stay_as_they_are(tmp_path, monkeypatch):
    """Below a mebibyte the header is short and nothing goes past the cache."""
    disk = Disk()
    monkeypatch.setattr(storage.os, "write", disk)
    small = {"weights/a": torch.arange(100.0)}
    (entry,) = put(HostBuffers().copy(small), tmp_path, rank=0, world_size=1)
    assert entry.bytes < 600
    assert split(disk.writes) == (0, entry.bytes)
