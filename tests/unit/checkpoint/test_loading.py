# SPDX-License-Identifier: Apache-2.0
"""Verified and read in one pass, straight into place."""

import hashlib
import itertools
import json

import pytest
import torch

from mprecipes.checkpoint import loading
from mprecipes.checkpoint.headers import read_headers
from mprecipes.checkpoint.loading import load
from mprecipes.checkpoint.storage import DamagedFile, FileEntry, put, put_json

NAME = "tensors-rank00000-000.safetensors"


@pytest.fixture
def saved(tmp_path):
    """Tensors of two files and a JSON file."""
    tensors = {
        "large": torch.arange(5_000_000, dtype=torch.float32).reshape(1000, 5000),
        "strided": torch.arange(12.0).reshape(3, 4),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    }
    entries = put(tensors, tmp_path, rank=0, world_size=1, max_file_bytes=10_000_000)
    entries.append(put_json([1, 2], tmp_path, "rank-00000.json", rank=0))
    return tensors, entries


def empty_like(tensors):
    into = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    into["strided"] = torch.empty(4, 3).T
    return into


def test_everything_lands_where_it_belongs(tmp_path, saved):
    """Into the memory that was given, contiguous or not; small files come as bytes; all counted."""
    tensors, entries = saved
    into = empty_like(tensors)
    pointers = {name: tensor.data_ptr() for name, tensor in into.items()}
    report = load(tmp_path, entries, read_headers(tmp_path, entries), into)
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == pointers
    assert json.loads(report.small["rank-00000.json"]) == [1, 2]
    assert report.num_bytes == sum(entry.bytes for entry in entries)
    assert report.predicted_seconds > 0
    assert report.bytes_per_second == report.num_bytes / report.seconds


@pytest.mark.parametrize("place", [20_000_000, 12_345_678, 200, 9, 0])
def test_a_changed_byte_anywhere_is_an_error(tmp_path, saved, place):
    """In the data at either end, in the header, in its length."""
    tensors, entries = saved
    path = tmp_path / entries[0].path
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)
    with pytest.raises(DamagedFile) as caught:
        load(tmp_path, entries, read_headers(tmp_path, entries), empty_like(tensors))
    assert caught.value.where == f"{tmp_path.name}/{entries[0].path}"


def test_the_other_files_are_verified_too(tmp_path, saved):
    """A JSON file of another rank is read and compared like the tensors."""
    tensors, entries = saved
    (tmp_path / "rank-00000.json").write_bytes(b"[1, 3]")
    entries[-1] = FileEntry("rank-00000.json", 6, hashlib.sha256(b"[1, 2]").hexdigest(), 0)
    with pytest.raises(DamagedFile, match="rank-00000.json"):
        load(tmp_path, entries, read_headers(tmp_path, entries), empty_like(tensors))


def test_long_loads_show_a_bar_on_a_terminal(tmp_path, saved, monkeypatch, capsys):
    """And none to a file or when it is quick."""
    tensors, entries = saved
    headers = read_headers(tmp_path, entries)
    load(tmp_path, entries, headers, empty_like(tensors), show=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(loading, "BAR_AFTER_SECONDS", 0.0)
    load(tmp_path, entries, headers, empty_like(tensors), show=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load(tmp_path, entries, headers, empty_like(tensors), show=True)
    assert "loading and verifying" in capsys.readouterr().err


@pytest.mark.parametrize("cuts", [[0, 2, 7], [0, 4, 5, 7], [0, 7]])
@pytest.mark.parametrize("live_cuts", [[0, 7], [0, 3, 7], [0, 2, 7]])
def test_any_cut_is_read_into_any_other(tmp_path, cuts, live_cuts, monkeypatch):
    """Ranges stored by one engine land in the ranges another holds, element by element."""
    monkeypatch.setattr(loading, "_CHUNK_BYTES", 8)  # two elements at once
    whole = torch.arange(7.0)
    stored = {
        f"weights/a[{low}:{high} of 7]": whole[low:high] for low, high in itertools.pairwise(cuts)
    }
    entries = put(stored, tmp_path, rank=0, world_size=1)
    headers = read_headers(tmp_path, entries)
    for low, high in itertools.pairwise(live_cuts):  # each rank reads all files
        mine = torch.full((high - low,), -1.0)
        load(tmp_path, entries, headers, {f"weights/a[{low}:{high} of 7]": mine})
        assert mine.tolist() == whole[low:high].tolist()
    full = torch.full((7,), -1.0)
    load(tmp_path, entries, headers, {"weights/a": full})
    assert full.tolist() == whole.tolist()


def test_a_range_lands_in_a_tensor_that_is_not_contiguous(tmp_path):
    """The element's index in the full tensor counts, not its place in memory."""
    whole = torch.arange(12.0)
    stored = {"weights/a[0:5 of 3x4]": whole[:5], "weights/a[5:12 of 3x4]": whole[5:]}
    entries = put(stored, tmp_path, rank=0, world_size=1)
    into = {"weights/a": torch.zeros(4, 3).T}
    load(tmp_path, entries, read_headers(tmp_path, entries), into)
    assert torch.equal(into["weights/a"], whole.view(3, 4))


def test_what_a_rank_holds_nothing_of_is_verified_all_the_same(tmp_path):
    """A flipped bit in another rank's part is found by this one too."""
    entries = put({"weights/a[0:4 of 8]": torch.ones(4)}, tmp_path, rank=0, world_size=1)
    headers = read_headers(tmp_path, entries)
    mine = {"weights/a[4:8 of 8]": torch.zeros(4)}
    load(tmp_path, entries, headers, mine)
    path = tmp_path / entries[0].path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match="sha256"):
        load(tmp_path, entries, headers, mine)
