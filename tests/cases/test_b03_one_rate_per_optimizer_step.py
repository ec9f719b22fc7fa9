# SPDX-License-Identifier: Apache-2.0
"""Case B03: the scheduler stepped once per micro-batch, so the rate fell far too fast.

Reports: starVLA/starVLA#210, tracel-ai/burn#5695.
"""

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup

from tests.reading import attempt_lines, journal

pytestmark = pytest.mark.launch


def test_b03_twenty_steps_of_four_micro_batches(cosine_cut):
    """80 micro-batches of 20 steps follow the 20 values of transformers' cosine, cut or not."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 4, 20)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    lines = journal(cosine_cut)
    assert [line["learning_rate"] for line in lines.values()] == pytest.approx(expected, rel=1e-9)
    assert expected[:5] == pytest.approx([0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert lines[20]["samples_seen"] == 80


def test_b03_no_step_was_made_twice(cosine_cut):
    """The first process made steps 1 to 10, the second 11 to 20: no jump hides in a replay."""
    made = [[line["step"] for line in attempt_lines(cosine_cut, attempt)] for attempt in (0, 1)]
    assert made == [list(range(1, 11)), list(range(11, 21))]
