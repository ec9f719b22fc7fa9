# SPDX-License-Identifier: Apache-2.0
"""Tensors to files and back."""

import dataclasses
import hashlib

import pytest
import safetensors
import torch

from mprecipes.checkpoint.loading import get, get_json
from mprecipes.checkpoint.storage import FileEntry, files_of, put, put_json, share_of
from mprecipes.errors import VerificationError

ZOO = {
    "float32": torch.arange(6.0).reshape(2, 3),
    "bfloat16": torch.tensor([1.5, -0.0, float("inf")], dtype=torch.bfloat16),
    "float64": torch.tensor([1e-300], dtype=torch.float64),
    "float8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j]),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "strided": torch.arange(12.0).reshape(3, 4).T,
    "nom_\u00e9": torch.tensor([7], dtype=torch.int16),
}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path):
    """All dtypes, no dimensions, no elements, strides and a name beyond ASCII survive."""
    entries = put(ZOO, tmp_path, rank=0, world_size=1)
    back = get(tmp_path, entries)
    assert back.keys() == ZOO.keys()
    for name, tensor in ZOO.items():
        assert (name, back[name].dtype, back[name].shape) == (name, tensor.dtype, tensor.shape)
        assert bits(back[name]) == bits(tensor)


def test_files_are_plain_safetensors_and_entries_say_what_is_on_disk(tmp_path):
    """The library of the format opens the file; size and SHA-256 are those of its bytes."""
    (entry,) = put(ZOO, tmp_path, rank=3, world_size=1)
    data = (tmp_path / entry.path).read_bytes()
    assert entry == FileEntry(
        "tensors-rank00003-000.safetensors", len(data), hashlib.sha256(data).hexdigest(), 3
    )
    with safetensors.safe_open(tmp_path / entry.path, framework="pt") as file:
        assert set(file.keys()) == set(ZOO)
        assert file.get_tensor("float32").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_two_known_bytes_in_two_runs(tmp_path):
    """The same tensors give the same file, to the byte, whatever order they come in."""
    tensors = {"b": torch.tensor([2.0]), "a": torch.tensor([1], dtype=torch.int64)}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (first,) = put(tensors, tmp_path / "one", rank=0, world_size=1)
    (second,) = put(dict(reversed(tensors.items())), tmp_path / "two", rank=0, world_size=1)
    assert first == second
    assert first.bytes == 8 + 112 + 8 + 4
    assert first.sha256 == "d79414009c25e9c6fc429f8430b754079add17f1aff04264c9332f00a3f0b1ec"


def test_large_state_is_cut_into_files_at_tensors(tmp_path):
    """No file exceeds the limit unless one tensor alone does."""
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(13)}  # 400 bytes each
    tensors["large"] = torch.zeros(500)
    entries = put(tensors, tmp_path, rank=0, world_size=1, max_file_bytes=1000)
    assert [entry.path[-15:-12] for entry in entries] == [f"{n:03d}" for n in range(8)]
    back = get(tmp_path, entries)
    assert {name: back[name].tolist() for name in tensors} == {
        name: tensors[name].tolist() for name in tensors
    }


def test_a_large_share_is_eight_files_of_equal_size():
    """Hashed and read in parallel; beyond 4 GiB eights of them, below 64 MiB one."""
    meta = {f"t{i}": torch.empty(1 << 20, device="meta") for i in range(1200)}  # 4 MiB each
    sizes = lambda names: [len(files_of(dict(list(meta.items())[:n]))) for n in names]  # noqa: E731
    assert sizes([1, 15, 16, 24, 64, 1024, 1025, 1200]) == [1, 1, 2, 3, 8, 8, 16, 16]
    assert {len(names) for names in files_of(meta)} == {75}


def test_large_tensors_have_files_of_their_own():
    """No two of more than 256 MiB fit into one file: 40 of them and 20 small ones are 40 files."""
    meta = {f"t{i}": torch.empty(70 << 20, device="meta") for i in range(40)}  # 280 MiB each
    meta |= {f"s{i}": torch.empty(1 << 18, device="meta") for i in range(20)}  # 1 MiB each
    files = files_of(meta)
    assert len(files) == 40
    assert sorted(name for names in files for name in names) == sorted(meta)
    assert {sum(name[0] == "t" for name in names) for names in files} == {1}


def test_ranks_share_whole_tensors_by_bytes(tmp_path):
    """Two ranks write each tensor once between them, half of the bytes each."""
    tensors = {f"t{i}": torch.zeros(10 + i) for i in range(8)}
    shares = [share_of(tensors, rank=rank, world_size=2) for rank in (0, 1)]
    assert sorted(shares[0] + shares[1]) == sorted(tensors)
    assert [sum(tensors[name].nbytes for name in share) for share in shares] == [216, 216]
    entries = [
        entry for rank in (0, 1) for entry in put(tensors, tmp_path, rank=rank, world_size=2)
    ]
    assert [entry.rank for entry in entries] == [0, 1]
    assert get(tmp_path, entries).keys() == tensors.keys()


def test_a_rank_without_a_share_writes_nothing(tmp_path):
    """With more ranks than tensors the last ones have no file."""
    assert put({"a": torch.zeros(1)}, tmp_path, rank=2, world_size=3) == []
    assert list(tmp_path.iterdir()) == []


def test_files_are_never_overwritten(tmp_path):
    """A second put into the same folder is refused by the file system."""
    put({"a": torch.zeros(1)}, tmp_path, rank=0, world_size=1)
    with pytest.raises(FileExistsError):
        put({"a": torch.ones(1)}, tmp_path, rank=0, world_size=1)


def test_a_tensor_the_format_cannot_hold_is_named(tmp_path):
    """complex128 has no name in safetensors."""
    with pytest.raises(TypeError, match="wide is torch.complex128"):
        put({"wide": torch.zeros(1, dtype=torch.complex128)}, tmp_path, rank=0, world_size=1)


def test_a_flipped_bit_is_found(tmp_path):
    """The error names file, both digests and what to do."""
    (entry,) = put({"a": torch.zeros(4)}, tmp_path, rank=1, world_size=1)
    path = tmp_path / entry.path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(VerificationError) as caught:
        get(tmp_path, [entry])
    assert caught.value.found == f"sha256 {hashlib.sha256(data).hexdigest()}"
    assert caught.value.expected == f"sha256 {entry.sha256}, as when rank 1 wrote it"
    assert caught.value.where == f"{tmp_path.name}/tensors-rank00001-000.safetensors"
    assert "the newest one that verifies" in caught.value.action


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes"),
        (lambda path: path.unlink(), "unreadable (No such file or directory)"),
    ],
)
def test_a_short_or_absent_file_is_refused(tmp_path, damage, found):
    """Size and presence are compared with the entry."""
    (entry,) = put({"a": torch.zeros(4)}, tmp_path, rank=0, world_size=1)
    damage(tmp_path / entry.path)
    with pytest.raises(VerificationError) as caught:
        get(tmp_path, [entry])
    assert found in caught.value.found
    assert f"{entry.bytes} bytes" in caught.value.expected


def test_right_digest_of_something_else_is_refused(tmp_path):
    """A file that is no safetensors file is said to be none, even with the right digest."""
    data = b"\x08\0\0\0\0\0\0\0notjson!"
    (tmp_path / "x.safetensors").write_bytes(data)
    entry = FileEntry("x.safetensors", len(data), hashlib.sha256(data).hexdigest(), 0)
    with pytest.raises(VerificationError, match="not a safetensors file"):
        get(tmp_path, [entry])


def test_a_tensor_in_two_files_is_refused(tmp_path):
    """Nobody chooses silently between two versions of one tensor."""
    entries = [put({"a": torch.zeros(1)}, tmp_path, rank=rank, world_size=1)[0] for rank in (0, 1)]
    with pytest.raises(VerificationError, match="tensors of another file again: a"):
        get(tmp_path, entries)


def test_json_comes_back_and_is_verified(tmp_path):
    """Small per-rank state is JSON under the same digests; other files are left to `get_json`."""
    entry = put_json({"x": [1, "two", None]}, tmp_path, "rank-00000.json", rank=0)
    assert get_json(tmp_path, entry) == {"x": [1, "two", None]}
    assert get(tmp_path, [entry]) == {}
    with pytest.raises(VerificationError):
        get_json(tmp_path, dataclasses.replace(entry, sha256="0" * 64))


def test_json_without_a_json_meaning_is_refused(tmp_path):
    """NaN is not JSON."""
    with pytest.raises(ValueError, match="Out of range float"):
        put_json({"x": float("nan")}, tmp_path, "rank-00000.json", rank=0)


@pytest.mark.parametrize(
    "point", ["save.before_file", "save.in_file", "save.before_sync", "save.after_file"]
)
def test_fault_points(tmp_path, monkeypatch, point):
    """A planted disk error comes out of `put` as it is."""
    monkeypatch.setenv("MPRECIPES_FAULT", f"enospc@{point}:4")
    put({"a": torch.zeros(1)}, tmp_path, rank=0, world_size=1, step=3)
    with pytest.raises(OSError, match=f"planted fault at {point}"):
        put({"a": torch.zeros(1)}, tmp_path, rank=1, world_size=1, step=4)
