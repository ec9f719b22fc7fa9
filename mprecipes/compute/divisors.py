# SPDX-License-Identifier: Apache-2.0
"""The batch sizes that divide a larger one, found in a bounded time for any number."""

import math

TRIALS = 1_000_000  # a fraction of a second; complete for numbers up to its square
LISTED = 24  # numbers that a message may hold


def divisors(number: int) -> list[int]:
    """Gives the divisors, ascending; above 10^12 those with no factor or cofactor below 10^6 lack.

    None of a number below 1.
    """
    if number < 1:
        return []
    small = [d for d in range(1, min(math.isqrt(number), TRIALS) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(numbers: list[int], wanted: int) -> str:
    """Gives ascending numbers in words: all of a few, else the nearest to the one wanted."""
    if len(numbers) <= LISTED:
        return ", ".join(map(str, numbers))
    near = sorted(sorted(numbers, key=lambda number: abs(number - wanted))[:LISTED])
    return f"{', '.join(map(str, near))} and {len(numbers) - LISTED} farther ones"
