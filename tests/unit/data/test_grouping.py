# SPDX-License-Identifier: Apache-2.0
"""Rows of like length together, as a function of the position alone."""

from dataclasses import replace

import numpy as np

from mprecipes.compute.ranks import BatchPlan
from mprecipes.data.chat_rows import ChatRows, write_rows
from mprecipes.data.fitting import Piece
from mprecipes.data.grouping import BATCHES, GroupedOrder, chat_order
from mprecipes.data.order import Position, SampleOrder

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


class Counted:
    """Lengths that count how often they are looked up: once for every sort."""

    def __init__(self):
        self.num_sorts = 0

    def __getitem__(self, rows):
        self.num_sorts += 1
        return LENGTHS[rows]


def test_a_stretch_is_sorted_once_however_often_it_is_asked_for():
    """Six stretches of 128 over an epoch's end, in micro-batches, as two readers ask for them."""
    lengths = Counted()
    counted = GroupedOrder(640, 5, lengths=lengths, global_batch=4)
    whole = order()(0, 768).tolist()
    counted(0, 4)
    counted(4, 4)
    assert lengths.num_sorts == 1
    for first in range(0, 768, 4):
        assert counted.rows(Position(samples_seen=first), 4).tolist() == whole[first : first + 4]
        ahead = min(first + 8, 764)  # a loader's workers read ahead, into the next stretch too
        assert counted(ahead, 4).tolist() == whole[ahead : ahead + 4]
    assert lengths.num_sorts == 6
    assert len(counted._sorted) == 2


def test_what_is_remembered_changes_no_order():
    """Forwards, back, over stretches and epochs, with ranges left out: as a new order gives it."""
    used = order()
    jumps = ((0, 8), (640, 9), (120, 16), (1270, 20), (0, 300), (640, 9), (5, 0), (125, 4))
    for first, count in jumps:
        found = used(first, count)
        assert found.tolist() == order()(first, count).tolist()
        found[:] = -1  # what is given belongs to the caller
    skipped = ((100, 140), (600, 700))
    left_out = replace(used, skipped=skipped)
    for first, count in jumps:
        wanted = replace(order(), skipped=skipped)(first, count).tolist()
        assert left_out(first, count).tolist() == wanted
        assert used.rows(Position(samples_seen=first, skipped=skipped), count).tolist() == wanted
    for change in ({"seed": 6}, {"global_batch": 2}, {"lengths": LENGTHS[::-1]}):
        fresh = GroupedOrder(640, **{"seed": 5, "lengths": LENGTHS, "global_batch": 4, **change})
        assert replace(used, **change)(0, 300).tolist() == fresh(0, 300).tolist()
        assert fresh(0, 300).tolist() != used(0, 300).tolist()


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
