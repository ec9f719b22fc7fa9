# SPDX-License-Identifier: Apache-2.0
"""Rows of like length together, as a function of the position alone."""

import numpy as np

from mprecipes.compute.ranks import BatchPlan
from mprecipes.data.chat_rows import ChatRows, write_rows
from mprecipes.data.fitting import Piece
from mprecipes.data.grouping import BATCHES, GroupedOrder, chat_order
from mprecipes.data.order import SampleOrder

LENGTHS = np.random.default_rng(3).integers(1, 500, 640)


def order(seed=5, batch=4):
    return GroupedOrder(len(LENGTHS), seed, lengths=LENGTHS, global_batch=batch)


def test_every_row_comes_once_per_epoch():
    """640 rows are 5 whole stretches of 32 batches of 4: each row once, in every epoch."""
    assert 5 * BATCHES * 4 == 640
    for epoch in (0, 1):
        assert sorted(order()(640 * epoch, 640).tolist()) == list(range(640))


def test_a_global_batch_holds_rows_of_like_length():
    """The spread of lengths in a batch is far below that of a plain shuffle."""

    def spread(which):
        return np.ptp(LENGTHS[which(0, 640)].reshape(-1, 4), axis=1).mean()

    assert spread(order()) < 0.05 * spread(SampleOrder(640, 5))


def test_any_part_is_the_same_part_of_the_whole():
    """A position can be taken up anywhere, in pieces of any size."""
    whole = order()(0, 1400)
    for first, count in ((0, 7), (125, 9), (128, 128), (600, 90), (1399, 1), (3, 0)):
        assert order()(first, count).tolist() == whole[first : first + count].tolist()
    assert order(seed=6)(0, 640).tolist() != whole[:640].tolist()


def test_the_order_that_a_data_set_asks_for(tmp_path):
    """Grouped data gets a grouped order, other data the plain one."""
    pieces = [Piece(np.arange(2), np.array([False, True]))] * 3
    write_rows(tmp_path, "train", pieces, [[0], [1], [2]])
    layout = {"seq_length": 4, "dtype": "int64", "pad_id": 0, "packed": False}
    plan = BatchPlan(micro_batch=1, accumulation=2, world_size=1, rank=0)
    plain = ChatRows(tmp_path, "train", **layout)
    grouped = ChatRows(tmp_path, "train", **layout, grouped=True)
    assert type(chat_order(plain, 1, plan)) is SampleOrder
    found = chat_order(grouped, 1, plan)
    assert isinstance(found, GroupedOrder)
    assert (found.global_batch, found.lengths.tolist()) == (2, [2, 2, 2])
