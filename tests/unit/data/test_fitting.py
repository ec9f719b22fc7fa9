# SPDX-License-Identifier: Apache-2.0
"""What is too long is cut by a policy and counted; the rest is packed without loss."""

from collections import Counter

import numpy as np
import pytest

from mprecipes.data.fitting import fit, pack


def cut(length, targets, policy, limit=4):
    counts = Counter()
    marks = np.zeros(length, dtype=bool)
    marks[targets] = True
    pieces = fit(np.arange(length), marks, limit, policy, counts)
    return [(p.ids.tolist(), np.flatnonzero(p.targets).tolist()) for p in pieces], +counts


def test_what_fits_is_left_alone():
    """Four tokens in a row of four."""
    assert cut(4, [2, 3], "drop") == ([([0, 1, 2, 3], [2, 3])], {})


@pytest.mark.parametrize(
    ("policy", "pieces", "counts"),
    [
        ("drop", [], {"too_long": 1, "dropped": 1, "cut_tokens": 6}),
        ("truncate_left", [([2, 3, 4, 5], [2, 3])], {"too_long": 1, "cut_tokens": 2}),
        (
            "truncate_right",
            [],
            {"too_long": 1, "cut_tokens": 6, "without_targets": 1},
        ),
        ("split", [([4, 5], [1])], {"too_long": 1, "cut_tokens": 4, "without_targets": 1}),
    ],
)
def test_six_tokens_of_which_the_last_two_are_targets(policy, pieces, counts):
    """Each policy gives its pieces and counts every token that is lost."""
    assert cut(6, [4, 5], policy) == (pieces, counts)


def test_the_first_token_of_a_piece_is_no_target():
    """Nothing predicts it, also where a conversation was cut in the middle of an answer."""
    pieces, _ = cut(6, [1, 2, 3, 4, 5], "truncate_left")
    assert pieces == [([2, 3, 4, 5], [1, 2, 3])]


def test_a_hand_made_packing():
    """The longest first, each into the fullest row that has room."""
    assert pack([3, 7, 5, 2, 3], 10) == [[0, 1], [2, 3, 4]]
    assert pack([], 10) == []
    assert pack([10, 10, 1], 10) == [[0], [1], [2]]


def test_every_piece_is_in_one_row_that_is_never_too_full():
    """2000 random pieces: none lost, none twice, and few rows more than the tokens need."""
    lengths = np.random.default_rng(0).integers(1, 65, 2000).tolist()
    rows = pack(lengths, 64)
    assert sorted(number for row in rows for number in row) == list(range(2000))
    assert max(sum(lengths[number] for number in row) for row in rows) <= 64
    assert len(rows) <= 1.02 * sum(lengths) / 64
    assert rows == pack(lengths, 64)
