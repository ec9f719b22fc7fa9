# SPDX-License-Identifier: Apache-2.0
"""Case A04 (huggingface/accelerate#3938): each rank's saved position was short by the number of
other ranks, so that a batch was trained on twice."""

import itertools

import torch

from mprecipes.compute.ranks import BatchPlan
from mprecipes.data.order import SampleOrder, micro_batches


def rows_of(rank, start, steps):
    data = [{"input_ids": torch.tensor(row)} for row in range(40)]
    batches = micro_batches(data, SampleOrder(40, 0), BatchPlan(2, 1, 2, rank), start=start)
    return [
        row for b in itertools.islice(batches, steps) for row in b.tensors["input_ids"].tolist()
    ]


def test_two_ranks_and_a_cut_share_every_row_once():
    """4 steps, a cut, and 6 more steps on 2 ranks of batch 2 train on 40 rows, each once."""
    rows = [row for rank in (0, 1) for row in rows_of(rank, 0, 4) + rows_of(rank, 16, 6)]
    assert sorted(rows) == list(range(40))
