# SPDX-License-Identifier: Apache-2.0
"""The names of the tensors in a file, also in a damaged one."""

import os

import pytest
import safetensors.torch
import torch

from mprecipes.checkpoint.contents import doubtful, listed, tensors_in
from mprecipes.checkpoint.manifest import Problem, verify_folder
from tests.kept import Folder, flip

FIRST, SECOND = "tensors-rank00000-000.safetensors", "tensors-rank00000-001.safetensors"


@pytest.fixture
def folder(tmp_path):
    """Two files: weights/a and its moment in the first, weights/b in the second."""
    ones = {name: torch.ones(4) for name in ("weights/a", "optimizer/a/exp_avg", "weights/b")}
    last = {"weights/b": ones.pop("weights/b")}
    safetensors.torch.save_file(ones, tmp_path / FIRST, metadata={"format": "pt"})
    safetensors.torch.save_file(last, tmp_path / SECOND)
    return tmp_path


def test_names_come_from_the_header(folder):
    """All names of a whole file, and of one whose data are damaged."""
    assert sorted(tensors_in(folder / FIRST)) == ["optimizer/a/exp_avg", "weights/a"]
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:-5])
    assert tensors_in(path) == ["weights/b"]


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x08" + b"\0" * 7 + b"[1, 2]  ", b"x"])
def test_what_is_no_header_holds_nothing(tmp_path, content):
    """Damage in the header itself gives no names and no error."""
    path = tmp_path / FIRST
    path.write_bytes(content)
    assert tensors_in(path) == []
    assert tensors_in(tmp_path / "absent") == []


def test_links_and_pipes_are_not_followed(folder):
    """What stands in a file's place is not read, and nothing waits for a pipe."""
    (folder / "link").symlink_to(folder / FIRST)
    os.mkfifo(folder / "pipe")
    assert tensors_in(folder / "link") == []
    assert tensors_in(folder / "pipe") == []


def test_without_a_header_the_manifest_tells(folder):
    """The weights that no other file holds were in the one that is gone."""
    (folder / FIRST).unlink()
    params = {"a": "float32", "b": "float32"}
    assert doubtful(folder, FIRST, [FIRST, SECOND], params) == ["weights/a"]
    assert doubtful(folder, SECOND, [FIRST, SECOND], params) == ["weights/b"]
    assert doubtful(folder, "rank-00000.json", [FIRST, SECOND], params) == []


def test_a_long_list_is_cut():
    """Six names, and how many more."""
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(number) for number in range(9)]) == "0, 1, 2, 3, 4, 5 and 3 more"


def test_a_problem_names_file_and_tensors(tmp_path):
    """Verification of a checkpoint with a flipped bit tells which tensors are doubtful."""
    folder = Folder(tmp_path).save(1).folder
    flip(folder / FIRST)
    (problem,) = verify_folder(folder)
    assert problem.path == FIRST
    assert sorted(problem.tensors) == ["optimizer/layer.weight/exp_avg", "weights/layer.weight"]
    assert "(in it: " in str(problem) and "weights/layer.weight" in str(problem)
    assert str(Problem("x", "1 bytes", "2 bytes")) == "x: 1 bytes, expected 2 bytes"
