# SPDX-License-Identifier: Apache-2.0
"""Case A01: a shuffled run cut mid-epoch went on with another permutation.

Reports: huggingface/accelerate#2823 (measured with 1.15), huggingface/accelerate#2016,
wyim-pgl/transgenic#59.
"""

import pytest

from tests.cases.conftest import CUTS
from tests.reading import assert_same_run

pytestmark = pytest.mark.launch


def test_every_row_once_an_epoch(reference):
    """Over each of the three epochs every id 0..63 is trained exactly once."""
    steps = reference.all_rows
    for epoch in range(3):
        rows = [row for step in steps[16 * epoch : 16 * (epoch + 1)] for row in step]
        assert sorted(rows) == list(range(64))
    assert steps[:16] != steps[16:32]


def test_rows_after_each_cut_are_the_reference_rows(reference, cut_run):
    """Processes that start after steps 5, 15, 16, 17, 21 and 32 see the rows of the reference."""
    starts = [0, *CUTS, 48]
    for launched, start, stop in zip(cut_run.rows, starts[:-1], starts[1:], strict=True):
        assert launched == reference.all_rows[start:stop]


def test_the_cut_run_is_the_reference_bit_by_bit(reference, cut_run):
    """Digests, learning rates, losses as float hex, and all final weights and moments are equal."""
    assert_same_run(cut_run.path, reference.path)
