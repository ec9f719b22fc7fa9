# SPDX-License-Identifier: Apache-2.0
"""The 64-bit mix that digests stand on."""

import pytest
import torch

from mprecipes.compute.mix import mix64, mix64_, signed64


def reference(value: int) -> int:
    """The same finaliser in Python's own integers."""
    mask = (1 << 64) - 1
    value &= mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return signed64(value ^ (value >> 31))


def test_known_values():
    """The mix of five numbers is these five numbers on every machine."""
    values = torch.tensor([0, 1, -1, 2**62, -(2**63)])
    assert mix64(values).tolist() == [
        0,
        6238072747940578789,
        -5417735806833148549,
        1360429390938723525,
        2720858781877447050,
    ]


def test_agrees_with_python_integers_on_both_signs():
    """Shifts are logical and products wrap, as in unsigned arithmetic."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-(2**63), 2**63 - 1, (1000,), generator=generator)
    assert mix64(values).tolist() == [reference(value) for value in values.tolist()]


def test_leaves_its_argument_alone_and_the_other_does_not():
    """`mix64` copies, `mix64_` writes into what it is given."""
    values = torch.tensor([1, 2])
    mixed = mix64(values)
    assert values.tolist() == [1, 2]
    assert mix64_(values) is values
    assert values.tolist() == mixed.tolist()


def test_one_bit_changes_about_half_of_the_result():
    """Flipping any single input bit flips between 16 and 48 of the 64 output bits."""
    base = reference(12345)
    for bit in range(64):
        flipped = int(mix64(torch.tensor([signed64(12345 ^ (1 << bit))]))[0])
        assert 16 <= bin((flipped ^ base) % (1 << 64)).count("1") <= 48


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 0), (2**63, -(2**63)), (2**64 - 1, -1), (2**64 + 5, 5), (-1, -1)]
)
def test_signed64_keeps_the_bits(value, expected):
    """An unsigned 64-bit number becomes the int64 with the same bits."""
    assert signed64(value) == expected
