# SPDX-License-Identifier: Apache-2.0
"""A 64-bit mix in torch integer arithmetic, the same number on every device; not cryptographic."""

import torch


def signed64(value: int) -> int:
    """Gives `value` modulo 2^64 as the int64 with the same bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_FIRST = signed64(0xBF58476D1CE4E5B9)
_SECOND = signed64(0x94D049BB133111EB)


def mix64(values: torch.Tensor) -> torch.Tensor:
    """Gives a bijective mix of each int64 element: one changed bit changes half of its bits.

    Zero stays zero: add a constant first where that matters.

    Source: the finaliser of splitmix64, Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014, constants of Stafford's Mix13.
    """
    return mix64_(values.clone())


def mix64_(values: torch.Tensor) -> torch.Tensor:
    """Mixes in place, like `mix64`, and gives `values` back."""
    values.bitwise_xor_(_shift_right(values, 30)).mul_(_FIRST)
    values.bitwise_xor_(_shift_right(values, 27)).mul_(_SECOND)
    return values.bitwise_xor_(_shift_right(values, 31))


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The logical shift; torch's own copies the sign bit."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)
