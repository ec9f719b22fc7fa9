# SPDX-License-Identifier: Apache-2.0
"""Case A08 (huggingface/transformers#5605, #8624; kohya-ss/sd-scripts#2425): the saved step counted
optimizer steps, the skip counted micro-batches."""

import itertools

import torch

from mprecipes.compute.ranks import BatchPlan
from mprecipes.data.order import Position, SampleOrder, micro_batches

PLAN = BatchPlan(micro_batch=2, accumulation=4, world_size=1, rank=0)


def rows_from(start, num_micro_batches):
    data = [{"input_ids": torch.tensor(row)} for row in range(64)]
    batches = micro_batches(data, SampleOrder(64, 0), PLAN, start=start)
    return [b.tensors["input_ids"].tolist() for b in itertools.islice(batches, num_micro_batches)]


def test_after_eleven_steps_of_four_micro_batches_comes_sample_89():
    """The next sample is number 88 counted from 0: epoch 1, offset 24; rows as without the cut."""
    position = Position()
    for _ in range(11):
        position = position.advance(PLAN.global_batch, tokens=8 * 15)
    assert (position.step, position.samples_seen) == (11, 88)
    order = SampleOrder(64, 0)
    assert (order.epoch(position.samples_seen), position.samples_seen % 64) == (1, 24)
    assert rows_from(position.samples_seen, 20) == rows_from(0, 64)[44:]


def test_a_skipped_update_moves_the_position_but_no_update():
    """Samples are consumed whether or not the update was applied."""
    position = Position().advance(8, 120, applied=False)
    assert (position.step, position.updates, position.samples_seen) == (1, 0, 8)
