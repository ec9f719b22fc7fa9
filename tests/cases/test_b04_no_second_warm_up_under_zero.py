# SPDX-License-Identifier: Apache-2.0
"""Case B04 under DeepSpeed: after a resume the learning rate goes on, warm-up is not repeated.

Source: huggingface/accelerate#1673, deepspeedai/DeepSpeed#3875. The rate is a function of the
updates; no scheduler is saved that a load could miss.
"""

import pytest

from tests.fix64 import RECIPE, options, write_rows
from tests.launching import launch
from tests.reading import journal, outcomes

pytestmark = pytest.mark.launch


def test_b04_the_rate_of_step_11_is_the_same_on_zero1(tmp_path):
    """20 steps, warm-up 4, cut at 10: step 11 has 6.913417e-04, step 2 a quarter of the peak."""
    rows, run = write_rows(tmp_path / "rows.jsonl"), tmp_path / "run"
    values = {"max_steps": 20, "warmup_steps": 4, "save_steps": 10, "learning_rate": 1e-3}
    words = options(rows, run, **values, per_device_train_batch_size=2)
    config = "accelerate_configs/zero1_bf16.yaml"
    for env in ({"MPRECIPES_FAULT": "terminate@step:9"}, {}):
        launch(RECIPE, words, config=config, num_processes=2, env=env)
    assert outcomes(run) == ["preempted", "finished"]
    rates = {step: line["learning_rate"] for step, line in journal(run).items()}
    assert rates[2] == 2.5e-4
    assert rates[11] == pytest.approx(6.913417e-04, rel=1e-6)
    assert list(rates) == list(range(1, 21))
