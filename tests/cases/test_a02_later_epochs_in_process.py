# SPDX-License-Identifier: Apache-2.0
"""Case A02 (huggingface/accelerate#1451; allenai/open-instruct#681): the skip of a resumed epoch
was applied to every later epoch as well."""

import itertools

import torch

from mprecipes.compute.ranks import BatchPlan
from mprecipes.data.order import SampleOrder, micro_batches


def trained_rows(start, steps):
    data = [{"input_ids": torch.tensor(row)} for row in range(64)]
    batches = micro_batches(data, SampleOrder(64, 0), BatchPlan(4, 1, 1, 0), start=start)
    return [batch.tensors["input_ids"].tolist() for batch in itertools.islice(batches, steps)]


def test_epochs_after_a_resume_keep_their_length():
    """After a cut at step 5 there are 11, 16 and 16 steps left, each epoch with all of its rows."""
    before, after = trained_rows(0, 5), trained_rows(20, 43)
    epochs = [before + after[:11], after[11:27], after[27:]]
    assert [len(epoch) for epoch in epochs] == [16, 16, 16]
    for epoch in epochs:
        assert sorted(row for step in epoch for row in step) == list(range(64))
    assert before + after == trained_rows(0, 48)
