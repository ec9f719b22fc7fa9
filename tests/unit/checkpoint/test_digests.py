# SPDX-License-Identifier: Apache-2.0
"""State digests: one number for one state, on any device, in any split."""

import hashlib
import itertools
import struct

import pytest
import torch

from mprecipes.checkpoint.digests import add_digests, state_digests, tensor_digest
from mprecipes.checkpoint.snapshot import live_tensors, take_snapshot
from tests.toys import toy, train_step

MASK = (1 << 64) - 1
GOLDEN_RATIO = 0x9E3779B97F4A7C15


@pytest.fixture
def trained():
    model, optimizer = toy()
    for step in (1, 2):
        train_step(model, optimizer, step)
    return model, optimizer


def mix(value):
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def by_definition(data, name, first=0):
    """The digest of bytes in whole Python numbers, as the module describes it."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    total = len(data) * (key | 1)
    for index, (byte,) in enumerate(struct.iter_unpack("b", data), start=first):
        row, place = divmod(index, 2048)
        sums = 0
        for column in range(16):
            small = (mix((place * 16 + column + 1) * GOLDEN_RATIO & MASK) & 63) * 2 - 63
            wide = mix((2048 * 16 + column + 1) * GOLDEN_RATIO & MASK) | 1
            sums += byte * small * wide
        total += sums * (mix((key + row * GOLDEN_RATIO) & MASK) | 1)
    return total & MASK


GOLDEN = {
    "float32": (torch.tensor([1.0, -2.5, 0.0]), "34e2f3068039cb6e"),
    "bfloat16": (torch.tensor([1.0, -2.5, 0.0], dtype=torch.bfloat16), "0b2fc5c256e27092"),
    "int64": (torch.tensor([[1, -1], [0, 2**62]]), "ad05214dce3fafd2"),
    "bool": (torch.tensor([True, False]), "235ef1c0871b7c50"),
    "scalar": (torch.tensor(3.0), "e4a3edd03db63c24"),
    "empty": (torch.zeros(0), "0000000000000000"),
    "rows": (torch.arange(2000, dtype=torch.int32) * 7919, "4bc89cccde208a6c"),
    "many": (torch.arange(150_000, dtype=torch.int32) * 7919, "54d9e3d7a3fcd5ac"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_digests_never_change(name):
    """These numbers are in manifests on people's disks."""
    tensor, expected = GOLDEN[name]
    assert f"{tensor_digest(tensor, 'layer.weight'):016x}" == expected


@pytest.mark.parametrize("first", [0, 5, 2046, 2048])
def test_a_digest_is_what_its_definition_says(first):
    """Against plain Python numbers, over the end of a row, at an offset."""
    values = torch.arange(-128, 128, dtype=torch.int16).mul(251).to(torch.int8).repeat(9)
    found = tensor_digest(values, "a.b", offset=first)
    assert found == by_definition(values.numpy().tobytes(), "a.b", first)


def test_many_changes_at_once_show():
    """All signs flipped, two halves swapped, every element one bit larger."""
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    found = {
        tensor_digest(tensor, "w")
        for tensor in (
            values, -values, values.roll(2500), values.flip(0),
            (values.view(torch.int32) ^ 1).view(torch.float32),
        )
    }  # fmt: skip
    assert len(found) == 5


def test_parts_add_up_to_the_digest_of_the_whole():
    """Any split, also at odd places and across the chunk size, gives the same sum modulo 2^64."""
    whole = torch.randn((1 << 17) + 1001, generator=torch.Generator().manual_seed(1))
    expected = tensor_digest(whole, "w")
    for cuts in ([0, 1, len(whole)], [0, 777, 99_999, (1 << 17) + 3, len(whole)]):
        spans = itertools.pairwise(cuts)
        parts = [tensor_digest(whole[start:end], "w", offset=start) for start, end in spans]
        assert sum(parts) % (1 << 64) == expected


def test_parts_of_complex_tensors_add_up_too():
    """The offset counts elements, not their halves."""
    whole = torch.tensor([1 + 2j, 3 - 4j, 5j])
    parts = tensor_digest(whole[:1], "w") + tensor_digest(whole[1:], "w", offset=1)
    assert parts % (1 << 64) == tensor_digest(whole, "w")


@pytest.mark.parametrize("bit", range(32))
def test_every_flipped_bit_shows(bit):
    """Flipping any one bit of any element changes the digest."""
    tensor = torch.tensor([0.5, -1.25, 3.0])
    before = tensor_digest(tensor, "w")
    for index in range(3):
        flipped = tensor.clone().view(torch.int32)
        flipped[index] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
        assert tensor_digest(flipped.view(torch.float32), "w") != before


def test_swaps_names_and_zeros_show():
    """Two swapped elements, two swapped tensors, and a longer tail of zeros give other digests."""
    assert tensor_digest(torch.tensor([1.0, 2.0]), "w") != tensor_digest(
        torch.tensor([2.0, 1.0]), "w"
    )
    assert tensor_digest(torch.tensor([1.0]), "a") != tensor_digest(torch.tensor([1.0]), "b")
    assert tensor_digest(torch.zeros(3), "w") != tensor_digest(torch.zeros(4), "w")


def test_layout_and_device_copies_do_not_show():
    """A transposed view counts in the order of its indices, whatever its strides."""
    view = torch.arange(6.0).reshape(2, 3).T
    assert tensor_digest(view, "w") == tensor_digest(view.contiguous(), "w")


def test_state_digests_by_kind(trained):
    """One digest for the weights and one for each kind of optimizer state, live or copied."""
    live = live_tensors(*trained)
    digests = state_digests(live)
    assert list(digests) == ["exp_avg", "exp_avg_sq", "step", "weights"]
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in digests.values())
    assert state_digests(take_snapshot(live)) == digests
    halves = (
        {name: live[name] for name in list(live)[::2]},
        {name: live[name] for name in list(live)[1::2]},
    )
    sums = [int(state_digests(half)["weights"], 16) for half in halves]
    assert f"{sum(sums) % (1 << 64):016x}" == digests["weights"]
    assert add_digests(map(state_digests, halves)) == digests


def test_state_digests_of_a_fresh_state():
    """Without optimizer state only the weights have a digest."""
    assert list(state_digests(live_tensors(*toy()))) == ["weights"]


def test_fragments_of_any_cut_add_up():
    """What ranks hold of a tensor gives the digest of the whole, by name and index."""
    whole = {"weights/a": torch.arange(5000.0).view(50, 100), "weights/b": torch.ones(3)}
    flat = whole["weights/a"].flatten()
    parts = [
        {"weights/a[0:1234 of 50x100]": flat[:1234], "weights/b": whole["weights/b"]},
        {"weights/a[1234:5000 of 50x100]": flat[1234:]},
    ]
    assert add_digests(map(state_digests, parts)) == state_digests(whole)
    wrong = {"weights/a[1233:4999 of 50x100]": flat[1234:]}
    assert add_digests(map(state_digests, [parts[0], wrong])) != state_digests(whole)
