# SPDX-License-Identifier: Apache-2.0
"""The order of samples, and the micro-batches and evaluation batches that follow from it."""

import itertools
import random
import subprocess
import time

import datasets
import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from mprecipes.compute.ranks import BatchPlan, Ranks
from mprecipes.data.order import MicroBatch, Position, SampleOrder, eval_batches, micro_batches
from mprecipes.errors import DataError


class Rows(Dataset):
    """Row i holds i; remembers which rows were read."""

    is_deterministic = True

    def __init__(self, num_rows):
        self.num_rows, self.read = num_rows, []

    def __len__(self):
        return self.num_rows

    def __getitem__(self, row):
        self.read.append(row)
        ids = torch.full((4,), row)
        return {"input_ids": ids, "labels": ids}


class NoisyRows(Rows):
    """Every item also holds draws from the three random streams of the host."""

    is_deterministic = False

    def __getitem__(self, row):
        noise = [random.random(), np.random.random(), torch.rand(()).item()]
        return {**super().__getitem__(row), "noise": torch.tensor(noise, dtype=torch.float64)}


def plan(micro_batch, accumulation=1, world_size=1, rank=0):
    return BatchPlan(micro_batch, accumulation, world_size, rank)


def take(batches, count):
    return list(itertools.islice(batches, count))


# The order


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 64, 1000, 1009])
def test_every_row_comes_once_per_epoch(num_sequences):
    """Each epoch is a permutation of all rows, whatever their number."""
    order = SampleOrder(num_sequences, seed=7)
    for epoch in range(3):
        rows = order(epoch * num_sequences, num_sequences)
        assert sorted(rows.tolist()) == list(range(num_sequences))


def test_the_order_is_the_recorded_one():
    """These numbers never change: a change would give every old run another order."""
    assert SampleOrder(10, seed=0)(0, 20).tolist() == [
        *(5, 7, 3, 0, 6, 2, 9, 8, 4, 1),
        *(4, 5, 9, 1, 0, 7, 6, 3, 2, 8),
    ]
    assert SampleOrder(1009, seed=123)(5, 6).tolist() == [875, 137, 151, 937, 733, 837]
    order = SampleOrder(10**9, seed=0)
    assert order(0, 4).tolist() == [497243743, 584990965, 177331991, 364867427]
    assert order(10**9 - 2, 4).tolist() == [856901727, 877662235, 333737363, 417855525]


def test_a_slice_is_the_same_from_anywhere():
    """Any sample asked for alone, across an epoch's end too, is the one of the whole order."""
    order = SampleOrder(97, seed=3)
    whole = order(0, 300)
    for first, count in ((0, 1), (96, 2), (50, 200), (299, 1), (97, 97), (10, 0)):
        assert order(first, count).tolist() == whole[first : first + count].tolist()
    assert whole.dtype == np.int64


def test_epochs_and_seeds_differ():
    """No two epochs and no two seeds, neighbours or negative, share an order."""
    orders = [SampleOrder(64, 0)(64 * epoch, 64).tolist() for epoch in range(3)]
    orders += [SampleOrder(64, seed)(0, 64).tolist() for seed in (1, 2, -1, 2**40)]
    assert len({tuple(order) for order in orders}) == 7


def test_a_billion_rows_stay_in_range_and_apart():
    """Far inside a huge epoch, rows are distinct, in range and spread over all of it."""
    order = SampleOrder(10**9, seed=5)
    rows = np.concatenate([order(first, 2000) for first in (0, 123_456_789, 10**9 - 2000)])
    assert len(set(rows.tolist())) == 6000
    assert 0 <= rows.min() < 10**6
    assert 10**9 - 10**6 < rows.max() < 10**9
    assert abs(rows.mean() / 5e8 - 1) < 0.03
    assert order(7 * 10**9 + 3, 1).item() != order(3, 1).item()


@pytest.mark.parametrize(("num_sequences", "limit"), [(3, 23.5), (7, 76.6), (10, 137.2)])
def test_each_row_is_equally_often_at_each_place(num_sequences, limit):
    """Over 20000 epochs, chi-square of places stays below its 0.9999 quantile."""
    epochs = 20_000
    rows = SampleOrder(num_sequences, 1)(0, num_sequences * epochs).reshape(epochs, -1)
    counts = np.stack([(rows == row).sum(axis=0) for row in range(num_sequences)])
    expected = epochs / num_sequences
    assert ((counts - expected) ** 2 / expected).sum() < limit  # (n - 1)^2 degrees of freedom


def test_all_permutations_of_four_rows_occur_equally():
    """Chi-square over the 24 orders of four rows stays below its 0.999 quantile."""
    rows = SampleOrder(4, 3)(0, 4 * 24_000).reshape(-1, 4)
    _, counts = np.unique(rows, axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 49.7


def test_neighbours_do_not_stay_neighbours():
    """In a large epoch, rows next to each other come next to each other only by chance."""
    rows = SampleOrder(100_003, 5)(0, 100_003)
    assert (np.abs(np.diff(rows)) == 1).sum() < 12
    assert abs(np.corrcoef(rows, np.arange(100_003))[0, 1]) < 0.02


def test_the_epoch_of_a_sample():
    """The last sample of an epoch and the first of the next are told apart."""
    order = SampleOrder(64, 0)
    assert [order.epoch(k) for k in (0, 63, 64, 128)] == [0, 0, 1, 2]


def test_no_rows_are_refused():
    """An empty data set is an error of the data, not an endless loop."""
    with pytest.raises(DataError) as caught:
        SampleOrder(0, 0)
    error = caught.value
    assert (error.found, error.where) == ("0 sequences", "training data")
    assert "at least one row" in error.expected
    assert "--seq_length" in error.action


def test_positions_count_steps_updates_samples_and_tokens():
    """A skipped update advances everything but `updates`."""
    position = Position().advance(8, 100).advance(8, 90, applied=False)
    assert position == Position(step=2, updates=1, samples_seen=16, tokens_seen=190)


# Micro-batches


def test_micro_batches_follow_the_order():
    """The first batch is the order's first samples, with their number and tensors."""
    data, order = Rows(10), SampleOrder(10, 0)
    first, second, third = take(micro_batches(data, order, plan(4), start=0), 3)
    assert (first.first_sample, first.rows) == (0, [5, 7, 3, 0])
    assert first.tensors["input_ids"].tolist() == [[row] * 4 for row in (5, 7, 3, 0)]
    assert (second.rows, third.first_sample, third.rows) == ([6, 2, 9, 8], 8, [4, 1, 4, 5])


def test_ranks_and_micro_batches_share_the_global_batch():
    """Micro-batch m of a global batch goes to rank m mod world size, so their union is the same."""
    order = SampleOrder(64, 1)
    whole = take(micro_batches(Rows(64), order, plan(2, 4), start=8), 8)
    shares = [
        take(micro_batches(Rows(64), order, plan(2, 2, 2, rank), start=8), 4) for rank in (0, 1)
    ]
    assert [b.rows for b in shares[0]] == [b.rows for b in whole[0::2]]
    assert [b.rows for b in shares[1]] == [b.rows for b in whole[1::2]]
    assert [b.first_sample for b in shares[1]] == [10, 14, 18, 22]


@pytest.mark.parametrize("kind", [Rows, NoisyRows])
def test_workers_change_nothing(kind):
    """Two workers and none give identical batches, draws of the data set included."""
    order = SampleOrder(20, 2)
    one, two = (
        micro_batches(kind(20), order, plan(3), start=6, num_workers=number) for number in (0, 2)
    )
    for left, right in zip(take(one, 9), take(two, 9)):
        assert (left.first_sample, left.rows) == (right.first_sample, right.rows)
        assert left.tensors.keys() == right.tensors.keys()
        for name in left.tensors:
            assert torch.equal(left.tensors[name], right.tensors[name])
    two.close()


def test_what_a_data_set_draws_follows_the_sample():
    """After a resume, with other draws before, batch contents are those of the uncut run."""
    order = SampleOrder(20, 2)
    whole = take(micro_batches(NoisyRows(20), order, plan(2), start=0), 8)
    random.random(), np.random.random(), torch.rand(5)
    resumed = take(micro_batches(NoisyRows(20), order, plan(2), start=10), 3)
    for left, right in zip(whole[5:], resumed):
        assert torch.equal(left.tensors["noise"], right.tensors["noise"])
    noise = torch.cat([batch.tensors["noise"] for batch in whole])
    assert len(noise.unique()) == noise.numel()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [Rows, NoisyRows])
def test_nothing_is_drawn_from_the_streams_of_the_main_process(kind, num_workers):
    """Making, iterating and closing leaves the three host streams where they were."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    batches = micro_batches(kind(20), SampleOrder(20, 2), plan(2), start=0, num_workers=num_workers)
    take(batches, 12)
    batches.close()
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after


def test_a_failing_data_set_leaves_the_streams_as_they_were():
    """Also when an item cannot be read, the main process's streams are put back."""

    class Broken(NoisyRows):
        def __getitem__(self, row):
            super().__getitem__(row)
            raise OSError("disk")

    before = torch.get_rng_state().tolist(), random.getstate()
    with pytest.raises(OSError, match="disk"):
        next(micro_batches(Broken(4), SampleOrder(4, 0), plan(2), start=0))
    assert (torch.get_rng_state().tolist(), random.getstate()) == before


def test_skipped_rows_are_never_read():
    """Starting at sample 40 reads the rows from there on and nothing before."""
    data, order = Rows(64), SampleOrder(64, 0)
    take(micro_batches(data, order, plan(4), start=40), 2)
    assert data.read == order(40, 8).tolist()


def children():
    return {child.pid for child in psutil.Process().children()}


def test_closing_ends_the_workers():
    """After `close` no worker process is left."""
    before = children()
    batches = micro_batches(Rows(8), SampleOrder(8, 0), plan(2), start=0, num_workers=2)
    next(batches)
    assert len(children() - before) == 2
    batches.close()
    assert children() <= before


def test_stop_signals_leave_the_workers_alive():
    """A SIGTERM to the whole process group does not take the rows of the last steps away."""
    before = children()
    batches = micro_batches(Rows(64), SampleOrder(64, 0), plan(2), start=0, num_workers=2)
    next(batches)
    workers = sorted(children() - before)
    for name in ("TERM", "INT", "USR1"):
        subprocess.run(["sh", "-c", f"kill -{name} {workers[0]} {workers[1]}"], check=True)
    assert [batch.first_sample for batch in take(batches, 20)] == list(range(2, 42, 2))
    batches.close()
    assert not set(workers) & children()


def test_a_shorter_data_set_than_the_order_is_refused():
    """An order over other rows than the data set's is found before the first batch."""
    with pytest.raises(DataError) as caught:
        micro_batches(Rows(9), SampleOrder(10, 0), plan(2), start=0)
    error = caught.value
    assert error.found == "a data set of 9 rows and an order over 10"
    assert "exactly the rows" in error.expected
    assert error.where == "micro_batches"
    assert "SampleOrder(len(data), seed)" in error.action


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    "stream", [Stream(), datasets.Dataset.from_dict({"a": [1]}).to_iterable_dataset()]
)
def test_streams_are_refused(stream):
    """A stream has no exact position, and the message names the indexed alternative."""
    for call in (
        lambda: micro_batches(stream, SampleOrder(1, 0), plan(1), start=0),
        lambda: next(eval_batches(stream, batch_size=1, ranks=Ranks())),
    ):
        with pytest.raises(DataError) as caught:
            call()
        error = caught.value
        assert "a stream without an index" in error.found
        assert "map-style" in error.expected
        assert error.where == "training data"
        assert "save_to_disk" in error.action


def test_a_batch_moves_to_a_device():
    """The moved batch keeps its numbers and rows."""
    batch = MicroBatch(3, [1], {"input_ids": torch.ones(1, 2)}).to("meta")
    assert (batch.first_sample, batch.rows) == (3, [1])
    assert batch.tensors["input_ids"].device.type == "meta"


def test_the_first_batch_is_quick_anywhere():
    """Restoring a position of a billion samples takes no longer than the beginning."""
    started = time.perf_counter()
    SampleOrder(10**9, 0)(10**9 - 512, 512)
    assert time.perf_counter() - started < 0.5  # 0.3 ms on a quiet machine


# Evaluation


@pytest.mark.parametrize(("num_rows", "world_size"), [(10, 2), (8, 2), (1, 3), (7, 1)])
def test_evaluation_reads_every_row_once(num_rows, world_size):
    """Over all ranks each row's labels count once, in equally many batches of equal shape."""
    shares = [
        list(eval_batches(Rows(num_rows), batch_size=2, ranks=Ranks(rank, world_size)))
        for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    assert sorted(row for batch in batches for row in batch.rows) == list(range(num_rows))
    labels = torch.cat([batch.tensors["labels"] for batch in batches])
    assert labels.shape[0] == 2 * len(batches)
    counted = labels[labels != -100].tolist()
    assert sorted(counted) == sorted(row for row in range(num_rows) for _ in range(4))


def test_padding_spoils_no_row():
    """The data set's own tensors are not written to by padding."""
    data = Rows(3)
    held = [data[row] for row in range(3)]
    data.__getitems__ = lambda rows: [held[row] for row in rows]
    take(eval_batches(data, batch_size=2, ranks=Ranks()), 2)
    assert [item["labels"].tolist() for item in held] == [[0] * 4, [1] * 4, [2] * 4]


def numbers(order, count=12, first=0):
    return order.whole(np.arange(first, first + count)).tolist()


@pytest.mark.parametrize(
    ("skipped", "expected"),
    [
        ((), [0, 1, 2, 3, 4, 5, 6, 7]),
        (((2, 4),), [0, 1, 4, 5, 6, 7, 8, 9]),
        (((0, 3),), [3, 4, 5, 6, 7, 8, 9, 10]),
        (((4, 6), (1, 2)), [0, 2, 3, 6, 7, 8, 9, 10]),  # as they came, not in order
        (((2, 4), (4, 6)), [0, 1, 6, 7, 8, 9, 10, 11]),
        (((3, 5), (2, 7)), [0, 1, 7, 8, 9, 10, 11, 12]),  # the later spans the earlier
    ],
)
def test_skipped_ranges_are_passed_over(skipped, expected):
    """Numbering goes on without them; rows are those of the whole order at these numbers."""
    order, whole = SampleOrder(20, 5, skipped), SampleOrder(20, 5)
    assert numbers(order, 8) == expected
    assert numbers(order, 3, first=5) == expected[5:]
    assert order(0, 8).tolist() == [int(whole(number, 1)[0]) for number in expected]
    assert Position(samples_seen=1, skipped=skipped).following(4) == (expected[1], expected[4] + 1)


def test_a_position_carries_what_it_skips():
    """advance keeps the ranges, and the order gives the rows of a position without them."""
    order = SampleOrder(20, 5)
    position = Position(skipped=((2, 4),)).advance(2, 10)
    assert position == Position(1, 1, 2, 10, skipped=((2, 4),))
    assert order.rows(position, 3).tolist() == order(4, 3).tolist()
    assert order.rows(Position(), 3).tolist() == order(0, 3).tolist()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_micro_batches_go_on_elsewhere(num_workers):
    """After seek they come from that position, without what it skips, numbered without gaps."""
    order = SampleOrder(20, 5)
    batches = micro_batches(Rows(20), order, plan(2), start=0, num_workers=num_workers)
    take(batches, 3)
    batches.seek(Position(samples_seen=2, skipped=((4, 8),)))
    found = take(batches, 2)
    batches.close()
    assert [batch.first_sample for batch in found] == [2, 4]
    assert [batch.rows for batch in found] == [order(2, 2).tolist(), order(8, 2).tolist()]
    assert take(micro_batches(Rows(20), order, plan(2), start=Position()), 1)[0].first_sample == 0


def test_the_epoch_counts_what_was_skipped():
    """Sample 15 without five before it is number 20 of the order, in the second epoch."""
    assert SampleOrder(20, 5, ((3, 8),)).epoch(15) == 1
