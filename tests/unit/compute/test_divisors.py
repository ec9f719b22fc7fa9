# SPDX-License-Identifier: Apache-2.0
"""Divisors of small and of very large numbers, against right values."""

import pytest

from mprecipes.compute.divisors import divisors, nearest


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, [1]),
        (12, [1, 2, 3, 4, 6, 12]),
        (16, [1, 2, 4, 8, 16]),
        (97, [1, 97]),
        (0, []),
        (-4, []),
    ],
)
def test_divisors_of_small_numbers(number, expected):
    """All of them, each once, ascending; none of what is no size."""
    assert divisors(number) == expected


def test_divisors_are_those_that_trying_every_number_gives():
    """For every number up to 300."""
    for number in range(1, 301):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_divisors_of_numbers_too_large_to_count_to():
    """73 x 137 x 99990001 is 10^12 + 1; of 2^200 those with a factor below 10^6 are given."""
    assert divisors(10**12 + 1) == [
        1, 73, 137, 10_001, 99_990_001, 7_299_270_073, 13_698_630_137, 10**12 + 1,
    ]  # fmt: skip
    powers = [2**n for n in range(201)]
    assert divisors(2**200) == powers[:20] + powers[181:]


def test_a_message_holds_a_few_numbers():
    """All of 24; of 100 the 24 around the one wanted, and how many are left out."""
    assert nearest([1, 2, 3, 6], 4) == "1, 2, 3, 6"
    assert nearest([], 4) == ""
    words = nearest(list(range(1, 101)), 50)
    assert words.startswith("38, 39, ") and words.endswith(", 61 and 76 farther ones")
