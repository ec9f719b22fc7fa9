# SPDX-License-Identifier: Apache-2.0
"""An order that puts rows of like length into one batch, so that little is computed on padding.

Like `SampleOrder` a pure function of `(seed, k)`: within each stretch of BATCHES global batches of
that order, rows are sorted by length, cut into global batches, and these are permuted by a key.
Which rows an optimizer step sees depends on the global batch, not on processes or micro-batches.
"""

from dataclasses import dataclass, field

import numpy as np

from mprecipes.compute.ranks import BatchPlan
from mprecipes.data.chat_rows import ChatRows
from mprecipes.data.keyed import numbered_keys
from mprecipes.data.order import SampleOrder
from mprecipes.data.packed import PackedData

BATCHES = 32
_SALT = 0x67726F7570


@dataclass(frozen=True, kw_only=True)
class GroupedOrder(SampleOrder):
    """`SampleOrder` with rows of like length together; every row still comes once per epoch.

    Where an epoch ends inside a stretch, the rows of both epochs in it are sorted together. The two
    stretches sorted last stay in memory: a run asks for each once per micro-batch.

    Attributes:
        lengths: tokens of every row.
        global_batch: sequences of an optimizer step.
    """

    lengths: np.ndarray = field(repr=False)
    global_batch: int
    _sorted: dict[int, np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # a copy by `replace` starts with none: what it replaces may decide them

    def __call__(self, first: int, count: int) -> np.ndarray:
        """Gives the rows (int64) of the run's samples `first` .. `first + count - 1`."""
        numbers, places = np.divmod(
            self.whole(np.arange(first, first + count)), BATCHES * self.global_batch
        )
        rows = np.empty(count, dtype=np.int64)
        for number in np.unique(numbers).tolist():
            rows[numbers == number] = self._stretch(number)[places[numbers == number]]
        return rows

    def _stretch(self, number: int) -> np.ndarray:
        if number not in self._sorted:
            if len(self._sorted) == 2:
                del self._sorted[next(iter(self._sorted))]
            self._sorted[number] = self._sort(number)
        return self._sorted[number]

    def _sort(self, number: int) -> np.ndarray:
        size = BATCHES * self.global_batch
        rows = SampleOrder(self.num_sequences, self.seed)(number * size, size)
        rows = rows[np.argsort(self.lengths[rows], kind="stable")].reshape(BATCHES, -1)
        numbers = np.arange(BATCHES, dtype=np.uint64) + np.uint64(number * BATCHES)
        return rows[np.argsort(numbered_keys(self.seed ^ _SALT, numbers), kind="stable")].ravel()


def chat_order(data: PackedData, seed: int, plan: BatchPlan) -> SampleOrder:
    """Gives the order in which a run sees its rows: by like length where `data` asks for it."""
    if not (isinstance(data, ChatRows) and data.grouped):
        return SampleOrder(len(data), seed)
    return GroupedOrder(len(data), seed, lengths=data.lengths, global_batch=plan.global_batch)
