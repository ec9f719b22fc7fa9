# SPDX-License-Identifier: Apache-2.0
"""Which row is sample number k of a run, and the micro-batches that follow from it.

Promises: the order is a pure function of `(seed, k)`, so that a position is one number and
restoring it costs the same anywhere; every row comes once per epoch; skipped rows are never read;
what a data set draws for an item is keyed by `(seed, k)`; the main process's random streams are
not drawn from. Epochs follow each other without a gap: a global batch may hold the last rows of
one and the first of the next. Ranges that a rollback took out of the order are passed over, and
the numbering goes on without them. Streams without an index are refused.
"""

import contextlib
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from mprecipes.compute.ranks import BatchPlan, Ranks
from mprecipes.data.keyed import (
    GOLDEN,
    KeyedItems,
    mix64,
    numbered_keys,
    start_worker,
    starting_workers,
)
from mprecipes.errors import DataError
from mprecipes.faults import fault_point

IGNORED_LABEL = -100
Ranges = tuple[tuple[int, int], ...]
_ROUNDS = np.arange(1, 9, dtype=np.uint64) * GOLDEN


@dataclass(frozen=True)
class Position:
    """How far a run is; `samples_seen` and `skipped` are the whole position in the data.

    Attributes:
        step: optimizer steps attempted.
        updates: optimizer steps applied.
        samples_seen: sequences consumed, over all epochs and ranks.
        tokens_seen: targets that entered the loss.
        skipped: ranges (first, end) of the whole order that rollbacks took out of the run, as they
            came; `end` is the first sample after.
    """

    step: int = 0
    updates: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    skipped: Ranges = ()

    def advance(self, samples: int, tokens: int, applied: bool = True) -> "Position":
        """Gives the position after one more step over `samples` sequences with `tokens` targets."""
        return replace(
            self,
            step=self.step + 1,
            updates=self.updates + applied,
            samples_seen=self.samples_seen + samples,
            tokens_seen=self.tokens_seen + tokens,
        )

    def following(self, samples: int) -> tuple[int, int]:
        """Gives the range (first, end) of the whole order that the next `samples` lie in."""
        first, last = _whole(self.skipped, self.samples_seen + np.array([0, samples - 1])).tolist()
        return first, last + 1


def _whole(skipped: Ranges, samples: np.ndarray) -> np.ndarray:
    starts, lengths, end = [], [0], 0
    for first, last in sorted(skipped):
        first = max(first, end)  # ranges may overlap: a later one spans what was out already
        if last > first:
            starts.append(first - lengths[-1])
            lengths.append(lengths[-1] + last - first)
            end = last
    return samples + np.asarray(lengths)[np.searchsorted(starts, samples, side="right")]


@dataclass(frozen=True)
class SampleOrder:
    """A keyed permutation of the rows for every epoch: no memory, no state, constant-time seek.

    A generalised Feistel network over a near-square grid of just over `num_sequences` cells; a
    cell past the last row is permuted again until it is one. Source: Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002. A shuffle, not a cipher.

    Attributes:
        skipped: ranges (first, end) of the order that are left out; what follows is numbered on
            without them.

    Raises:
        DataError: there is no row to order.
    """

    num_sequences: int
    seed: int
    skipped: Ranges = ()

    def __post_init__(self) -> None:
        if self.num_sequences < 1:
            raise DataError(
                f"{self.num_sequences} sequences",
                expected="at least one row of training data",
                where="training data",
                action="give more text, or a smaller --seq_length",
            )

    def __call__(self, first: int, count: int) -> np.ndarray:
        """Gives the rows (int64) of the run's samples `first` .. `first + count - 1`."""
        samples = self.whole(np.arange(first, first + count)).astype(np.uint64)
        epochs, index = np.divmod(samples, np.uint64(self.num_sequences))
        keys = [mix64(numbered_keys(self.seed, epochs) + offset) for offset in _ROUNDS]
        rows = self._permute(index, keys)
        while (outside := np.flatnonzero(rows >= np.uint64(self.num_sequences))).size:
            rows[outside] = self._permute(rows[outside], [key[outside] for key in keys])
        return rows.astype(np.int64)

    def rows(self, position: Position, count: int) -> np.ndarray:
        """Gives the rows of the `count` samples that follow a position, without what it skips."""
        same = position.skipped == self.skipped  # a copy would not have what this one remembers
        order = self if same else replace(self, skipped=position.skipped)
        return order(position.samples_seen, count)

    def whole(self, samples: np.ndarray) -> np.ndarray:
        """Gives the numbers in the whole order of samples numbered without the skipped ranges."""
        return _whole(self.skipped, samples)

    def _permute(self, cells: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        side = math.isqrt(self.num_sequences - 1) + 1
        height, width = np.uint64(side), np.uint64(-(-self.num_sequences // side))
        row, column = np.divmod(cells, width)
        for even, odd in zip(keys[::2], keys[1::2]):
            row = (row + mix64(even + column) % height) % height
            column = (column + mix64(odd + row) % width) % width
        return row * width + column

    def epoch(self, sample: int) -> int:
        """Gives the epoch, from 0, that sample number `sample` belongs to."""
        return int(self.whole(np.array(sample))) // self.num_sequences


@dataclass(frozen=True)
class MicroBatch:
    """What one forward is given.

    Attributes:
        first_sample: number of its first sample in the run's order, the key of its random numbers.
        rows: its rows in order; in evaluation without the padding.
        tensors: the collated items, `(batch, ...)` each.
    """

    first_sample: int
    rows: list[int]
    tensors: dict[str, torch.Tensor]

    def to(self, device: torch.device | str) -> "MicroBatch":
        """Gives the batch on `device`; does not block where the host memory is pinned."""
        moved = {k: t.to(device, non_blocking=t.is_pinned()) for k, t in self.tensors.items()}
        return replace(self, tensors=moved)


class MicroBatches:
    """An endless iterator over one rank's micro-batches, which can be sent to another position.

    `close()`, or dropping it, ends its workers.
    """

    def __init__(
        self, load: Callable[[Position], Generator[MicroBatch, None, None]], start: Position
    ) -> None:
        self._load, self._batches = load, load(start)

    def __iter__(self) -> "MicroBatches":
        return self

    def __next__(self) -> MicroBatch:
        return next(self._batches)

    def seek(self, position: Position) -> None:
        """Goes on at another position; its workers are started anew."""
        self.close()
        self._batches = self._load(position)

    def close(self) -> None:
        """Ends the workers and gives no more batches."""
        self._batches.close()


def micro_batches(
    data: Any,
    order: SampleOrder,
    plan: BatchPlan,
    *,
    start: int | Position,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> MicroBatches:
    """Gives this rank's micro-batches from a position on, without end.

    Args:
        data: a map-style data set whose items are dicts of tensors. One that draws no random
            numbers may say so with `is_deterministic = True` and is then read without seeding.
        start: a position, or its `samples_seen` where nothing is skipped; any number, also one
            that another batch or world size left.

    Raises:
        DataError: `data` is a stream, or its length is not the order's.
    """
    _refuse_stream(data)
    if len(data) != order.num_sequences:
        raise DataError(
            f"a data set of {len(data)} rows and an order over {order.num_sequences}",
            expected="an order over exactly the rows of the data set",
            where="micro_batches",
            action="build the order as SampleOrder(len(data), seed)",
        )
    items = KeyedItems(data, order.seed)

    def load(position: Position) -> Generator[MicroBatch, None, None]:
        kept = replace(order, skipped=position.skipped)
        blocks = _Blocks(kept, plan, position.samples_seen)
        return _load(items, blocks, num_workers, pin_memory)

    if isinstance(start, int):
        start = Position(samples_seen=start, skipped=order.skipped)
    return MicroBatches(load, start)


def _load(
    items: KeyedItems, blocks: "_Blocks", num_workers: int, pin_memory: bool
) -> Generator[MicroBatch, None, None]:
    loader: DataLoader[Any] = DataLoader(
        items,  # type: ignore[arg-type]
        batch_sampler=blocks,
        collate_fn=_as_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=start_worker if num_workers else None,
        generator=torch.Generator().manual_seed(0),  # without one, the global stream is drawn from
    )
    with starting_workers() if num_workers else contextlib.nullcontext():
        batches = iter(loader)
    for first_sample, rows, tensors in batches:
        yield MicroBatch(first_sample, rows, tensors)


def _as_is(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class _Blocks:
    """The batch sampler of one rank: endless lists of (sample number, row)."""

    order: SampleOrder
    plan: BatchPlan
    start: int

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        size = self.plan.micro_batch
        first = self.start + self.plan.rank * size
        while True:
            yield list(zip(range(first, first + size), self.order(first, size).tolist()))
            first += self.plan.world_size * size


def eval_batches(data: Any, *, batch_size: int, ranks: Ranks) -> Iterator[MicroBatch]:
    """Gives every row once over all ranks, in equally many batches on each rank.

    Where rows run out, the batch is filled with copies of row 0 whose `labels` are all -100: a sum
    over valid targets is exact. Items must hold `labels`.

    Raises:
        DataError: `data` is a stream.
    """
    _refuse_stream(data)
    items, num_rows = KeyedItems(data, seed=0), len(data)
    for block in range(0, num_rows, batch_size * ranks.world_size):
        first = block + ranks.rank * batch_size
        rows = list(range(first, min(first + batch_size, num_rows)))
        padded = rows + [0] * (batch_size - len(rows))
        _, _, tensors = items.__getitems__([(row, row) for row in padded])
        tensors["labels"][len(rows) :] = IGNORED_LABEL
        fault_point("eval.batch")
        yield MicroBatch(first, rows, tensors)


def _refuse_stream(data: Any) -> None:
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        raise DataError(
            f"{type(data).__name__}, a stream without an index, which has no exact position",
            expected="a map-style data set, with a length and items by number",
            where="training data",
            action="save the rows once (Dataset.save_to_disk, .jsonl, .parquet) and name that path",
        )
