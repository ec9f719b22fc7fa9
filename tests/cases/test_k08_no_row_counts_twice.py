# SPDX-License-Identifier: Apache-2.0
"""Case K08 (huggingface/accelerate#2316, #961, #781): rows were repeated to even out the ranks, so
that they weighed double in training and were counted twice in evaluation."""

import itertools

import numpy as np
import torch

from mprecipes.compute.ranks import BatchPlan, Ranks
from mprecipes.data.chat_rows import ChatRows, write_rows
from mprecipes.data.fitting import Piece
from mprecipes.data.order import SampleOrder, eval_batches, micro_batches


def rows():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 64, (10, 16), generator=generator)
    return [{"input_ids": row, "labels": row.where(row > 5, -100)} for row in ids]


def test_training_takes_each_row_once_per_epoch():
    """10 rows, batch 2, 2 ranks: 30 samples are three epochs of each row exactly once."""
    shares = [
        micro_batches(rows(), SampleOrder(10, 0), BatchPlan(2, 1, 2, rank), start=0)
        for rank in (0, 1)
    ]
    steps = [[next(share).rows for share in shares] for _ in range(15)]
    samples = list(itertools.chain.from_iterable(itertools.chain.from_iterable(steps)))
    for epoch in range(6):
        assert sorted(samples[10 * epoch : 10 * (epoch + 1)]) == list(range(10))


def evaluate(world_size):
    """Gives the mean loss and the number of targets over all ranks of a fixed linear model."""
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    total, count = 0.0, 0
    for rank in range(world_size):
        for batch in eval_batches(rows(), batch_size=2, ranks=Ranks(rank, world_size)):
            logits = table[batch.tensors["input_ids"][:, :-1]]
            labels = batch.tensors["labels"][:, 1:]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
            )
            total, count = total + loss.item(), count + int((labels != -100).sum())
    return total / count, count


def test_evaluation_is_exact_over_every_row_once():
    """On 1, 2 and 3 ranks the loss agrees to 1e-6 and the number of targets exactly."""
    expected = sum(int((row["labels"][1:] != -100).sum()) for row in rows())
    (one, num_one), (two, num_two), (three, num_three) = map(evaluate, (1, 2, 3))
    assert num_one == num_two == num_three == expected
    assert abs(one - two) < 1e-6
    assert abs(one - three) < 1e-6


def test_rows_of_conversations_are_evaluated_once_on_any_number_of_ranks(tmp_path):
    """5 rows of unlike length on 1, 2 and 3 ranks: every target once, padding none."""
    pieces = [Piece(np.arange(2, 4 + n), np.arange(2 + n) > 0) for n in range(5)]
    write_rows(tmp_path, "heldout", pieces, [[n] for n in range(5)])
    data = ChatRows(tmp_path, "heldout", seq_length=9, dtype="int64", pad_id=0, packed=False)
    for world_size in (1, 2, 3):
        seen = []
        for rank in range(world_size):
            for batch in eval_batches(data, batch_size=2, ranks=Ranks(rank, world_size)):
                labels = batch.tensors["labels"]
                seen += labels[labels != -100].tolist()
        assert sorted(seen) == sorted(int(n) for piece in pieces for n in piece.ids[1:])
