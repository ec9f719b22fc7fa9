# SPDX-License-Identifier: Apache-2.0
"""Case B01: a prepared scheduler stepped once per process and ended after 1/N of the training.

Reports: huggingface/accelerate#2926, huggingface/accelerate#2142, huggingface/transformers#24088,
jzhang38/EasyContext#21.
"""

import pytest

from tests.fix64 import RECIPE, options
from tests.launching import launch
from tests.reading import journal

pytestmark = pytest.mark.launch
LINEAR = [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_b01_linear_on_one_and_two_processes(tmp_path, fix64, num_processes):
    """Warm-up 2 of 10 steps, peak 1e-3, accumulation 4: the published list times 1e-3."""
    words = options(
        fix64, tmp_path / "run", lr_scheduler_type="linear", gradient_accumulation_steps=4,
        per_device_train_batch_size=1,
    )  # fmt: skip
    done = launch(RECIPE, words, num_processes=num_processes)
    assert done.returncode == 0, done.output
    found = [line["learning_rate"] for line in journal(tmp_path / "run").values()]
    assert found == pytest.approx([1e-3 * rate for rate in LINEAR], rel=1e-12)
