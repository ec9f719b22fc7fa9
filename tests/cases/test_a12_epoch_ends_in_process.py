# SPDX-License-Identifier: Apache-2.0
"""Case A12 (huggingface/accelerate#4264; Red-Hat-AI-Innovation-Team/mini_trainer#79;
meta-pytorch/data#1437): a cut exactly at an epoch's end repeated or emptied the next epoch."""

import itertools

import pytest
import torch

from mprecipes.compute.ranks import BatchPlan
from mprecipes.data.order import SampleOrder, micro_batches


@pytest.mark.parametrize("cut", [15, 16, 17, 32])
def test_the_rows_after_the_cut_are_those_of_the_uncut_run(cut):
    """Around an epoch's end there is no special place: rows after the cut are the uncut run's."""
    data = [{"input_ids": torch.tensor(row)} for row in range(64)]
    order = SampleOrder(64, 0)

    def rows_from(start, steps):
        batches = micro_batches(data, order, BatchPlan(4, 1, 1, 0), start=start)
        return [b.tensors["input_ids"].tolist() for b in itertools.islice(batches, steps)]

    assert rows_from(4 * cut, 48 - cut) == rows_from(0, 48)[cut:]
    assert (order.epoch(4 * cut), 4 * cut % 64) == {
        15: (0, 60),
        16: (1, 0),
        17: (1, 4),
        32: (2, 0),
    }[cut]
