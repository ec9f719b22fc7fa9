# SPDX-License-Identifier: Apache-2.0
"""Case A02: the skip of a resume was applied to every later epoch too.

Reports: huggingface/accelerate#1451, allenai/open-instruct#681.
"""

import pytest

pytestmark = pytest.mark.launch


def test_three_epochs_of_sixteen_steps(cut_run):
    """Killed at step 5 and resumed, 48 steps are trained in all, sixteen an epoch."""
    assert [len(launched) for launched in cut_run.rows] == [5, 10, 1, 1, 4, 11, 16]
    for epoch in range(3):
        rows = [row for step in cut_run.all_rows[16 * epoch : 16 * (epoch + 1)] for row in step]
        assert sorted(rows) == list(range(64))
