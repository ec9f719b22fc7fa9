# SPDX-License-Identifier: Apache-2.0
"""Case A04: with two processes a saved counter was one too low, and a batch was trained twice.

Report: huggingface/accelerate#3938.
"""

import pytest

from tests.cases.conftest import watch
from tests.fix64 import write_rows

pytestmark = pytest.mark.launch


def test_forty_rows_each_once_over_ranks_and_restarts(tmp_path):
    """40 rows, 2 processes x 2 rows, cut after step 4: 6 steps are left and every id came once."""
    data = write_rows(tmp_path / "rows.jsonl", 40)
    seen = watch(
        tmp_path, data, faults=["kill@step:4"], processes=[2, 2],
        per_device_train_batch_size=2, max_steps=10, save_steps=4,
    )  # fmt: skip
    assert [len(launched) for launched in seen.rows] == [4, 6]
    assert sorted(row for step in seen.all_rows for row in step) == list(range(40))
