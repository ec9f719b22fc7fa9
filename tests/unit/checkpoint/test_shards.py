# SPDX-License-Identifier: Apache-2.0
"""Every value has its place in a file before a byte is written, and may arrive in any order."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mprecipes.checkpoint.shards import ShardWriter, index_of, parse_size, plan_shards
from mprecipes.errors import ConfigError

SHAPES = {"a": [4, 2], "b": [3], "c": [], "big": [100], "flag": [5]}
KINDS = {
    "a": torch.float32, "b": torch.bfloat16, "c": torch.int64, "big": torch.float32,
    "flag": torch.bool,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GB", 2_000_000_000), ("500MB", 500_000_000), ("1GiB", 1 << 30), ("1.5 kb", 1500)],
)
def test_sizes_are_those_of_hugging_face(text, size):
    """GB is a power of 1000, GiB of 1024; a fraction and a space are allowed."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["2", "GB", "-1GB", "0MB", "2TB", "1e9B"])
def test_no_size_is_guessed(text):
    """A number without unit, or a unit that is not known, is refused with an example."""
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    error = caught.value
    assert error.found == f"max_shard_size {text!r}" and "KiB, MiB, GiB" in error.expected
    assert error.where == "--max_shard_size" and "--max_shard_size 2GB" in error.action


def test_parameters_are_cut_in_their_order():
    """Up to 50 bytes a file: a and b fit together with c, big is alone, flag comes after."""
    shards = plan_shards(KINDS, SHAPES, 50)
    assert [sorted(shard.offsets) for shard in shards] == [["a", "b", "c"], ["big"], ["flag"]]
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [shard.path for shard in shards] == names
    index = index_of(shards, SHAPES)
    assert index["metadata"] == {"total_parameters": 117, "total_size": 32 + 6 + 8 + 400 + 5}
    assert index["weight_map"] == {
        "a": names[0], "b": names[0], "big": names[1], "c": names[0], "flag": names[2],
    }  # fmt: skip
    assert [shard.path for shard in plan_shards(KINDS, SHAPES, 10**6)] == ["model.safetensors"]


def test_pieces_may_come_in_any_order(tmp_path):
    """Written backwards, one value at a time, safetensors reads the files back."""
    torch.manual_seed(0)
    values = {name: (torch.randn(SHAPES[name]) * 9).to(KINDS[name]) for name in SHAPES}
    shards = plan_shards(KINDS, SHAPES, 50)
    with ShardWriter(tmp_path, shards) as writer:
        for name in reversed(SHAPES):
            flat = values[name].reshape(-1)
            for start in reversed(range(len(flat))):
                writer.write(name, start, flat[start : start + 1])
    found = {}
    for shard in shards:
        found |= load_file(tmp_path / shard.path)
        with safe_open(tmp_path / shard.path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert found.keys() == values.keys()
    for name, tensor in values.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
