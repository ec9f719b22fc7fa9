# SPDX-License-Identifier: Apache-2.0
"""Shares of several sources in an epoch."""

import numpy as np

from mprecipes.data.mixture import mixed_rows


def test_one_source_is_itself():
    """Every row once."""
    assert [rows.tolist() for rows in mixed_rows([3], [1.0])] == [[0, 1, 2]]


def test_shares_are_kept_and_every_row_is_there():
    """7 rows at 0.7 and 2 rows at 0.3: an epoch of 10, in which the smaller source comes again."""
    found = mixed_rows([7, 2], [0.7, 0.3])
    assert [rows.tolist() for rows in found] == [list(range(7)), [0, 1, 0]]


def test_random_shares():
    """Every row of every source at least once, and each share to within one row."""
    draw = np.random.default_rng(1)
    for _ in range(200):
        sizes = draw.integers(1, 60, 3).tolist()
        shares = draw.dirichlet([2, 2, 2]).tolist()
        found = mixed_rows(sizes, shares)
        total = sum(map(len, found))
        for rows, size, share in zip(found, sizes, shares):
            assert set(rows.tolist()) == set(range(size))
            assert abs(len(rows) - share * total) <= 1.5
            assert np.bincount(rows).max() - np.bincount(rows).min() <= 1
