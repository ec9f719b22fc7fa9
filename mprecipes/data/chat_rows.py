# SPDX-License-Identifier: Apache-2.0
"""Rows of one or more pieces in memory-mapped files, as a map-style data set.

On disk, for a part named `train`: `train.ids` and `train.targets` (one byte a token) hold all
pieces one after the other in the order of the rows; `train.pieces` their ends, `train.rows` the
ends of rows counted in pieces, `train.counts` the targets of each row, all native int64.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mprecipes.data.fitting import Piece
from mprecipes.data.packed import PackedData

IGNORED, PADDING = -100, -1


def write_rows(folder: Path, part: str, pieces: Sequence[Piece], rows: list[list[int]]) -> None:
    """Writes the files of one part.

    Args:
        rows: piece numbers of each row, in order.
    """
    in_order = [pieces[number] for row in rows for number in row]
    arrays = {
        "ids": np.concatenate([piece.ids for piece in in_order]),
        "targets": np.concatenate([piece.targets for piece in in_order]).astype(np.uint8),
        "pieces": np.cumsum([len(piece.ids) for piece in in_order], dtype=np.int64),
        "rows": np.cumsum([len(row) for row in rows], dtype=np.int64),
        "counts": np.array(
            [sum(int(pieces[n].targets.sum()) for n in row) for row in rows], dtype=np.int64
        ),
    }
    for name, array in arrays.items():
        array.tofile(folder / f"{part}.{name}")


class ChatRows(PackedData):
    """Rows of conversations; opened lazily, so each worker maps the files itself.

    Item, each `(length,)` int64: `input_ids`; `labels`, -100 where nothing is learned (the loss
    shifts them); `position_ids`, from 0 in every piece; `segment_ids`, the number of the piece in
    the row, -1 in padding. Items asked for together have one length: `seq_length` where rows are
    packed, else that of the longest.

    Args:
        index: the rows this data set gives, by number in the files; None for all, in order.
        pad_id: what fills up; never a target, whatever else the token is.
        pad_left: padding stands before the row, not behind it.
        packed: every item has `seq_length`.
        grouped: rows of like length should be read together.
    """

    def __init__(
        self,
        folder: Path,
        part: str,
        *,
        seq_length: int,
        dtype: str,
        pad_id: int,
        index: np.ndarray | None = None,
        pad_left: bool = False,
        packed: bool = True,
        grouped: bool = False,
    ) -> None:
        ends = np.fromfile(folder / f"{part}.rows", dtype=np.int64)
        self._counts = np.fromfile(folder / f"{part}.counts", dtype=np.int64)
        self._index = np.arange(len(ends)) if index is None else index
        super().__init__(
            folder / f"{part}.ids", seq_length=seq_length, dtype=dtype, num_rows=len(self._index)
        )
        self.folder, self.part, self.pad_id = folder, part, pad_id
        self.pad_left, self.packed, self.grouped = pad_left, packed, grouped
        self._ends = ends
        self._files: dict[str, np.ndarray] = {}

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of every row."""
        pieces = np.append(0, self._open("pieces", np.int64))
        begins = np.append(0, self._ends[:-1])
        return (pieces[self._ends] - pieces[begins])[self._index]

    def num_targets(self, rows: np.ndarray) -> int:
        """Gives the number of targets that enter the loss of these rows, without reading them."""
        return int(self._counts[self._index[np.asarray(rows, dtype=np.int64)]].sum())

    def __getitems__(self, rows: list[int]) -> list[dict[str, torch.Tensor]]:
        """Gives the items of `rows`, padded to one length."""
        index = np.asarray(rows, dtype=np.int64)
        if ((index < 0) | (index >= self.num_rows)).any():
            raise IndexError(f"rows {rows} of {self.num_rows} in {self.path}")
        parts = [self._pieces(int(number)) for number in self._index[index]]
        longest = max(int(part[-1]) - int(part[0]) for part in parts)
        length = self.seq_length if self.packed else longest
        return [self._item(part, length) for part in parts]

    def _pieces(self, number: int) -> np.ndarray:
        """The places in the files where the pieces of a row begin, and where the last one ends."""
        pieces = self._open("pieces", np.int64)
        first = int(self._ends[number - 1]) if number else 0
        begin = int(pieces[first - 1]) if first else 0
        return np.append(begin, pieces[first : self._ends[number]])

    def _item(self, places: np.ndarray, length: int) -> dict[str, torch.Tensor]:
        begin, end = int(places[0]), int(places[-1])
        sizes = np.diff(places)
        ids = self._open("ids", self.dtype)[begin:end].astype(np.int64)
        is_target = self._open("targets", np.uint8)[begin:end].astype(bool)
        values = {
            "input_ids": (ids, self.pad_id),
            "labels": (np.where(is_target, ids, IGNORED), IGNORED),
            "position_ids": (np.concatenate([np.arange(size) for size in sizes]), 0),
            "segment_ids": (np.repeat(np.arange(len(sizes)), sizes), PADDING),
        }
        missing = length - (end - begin)
        widths = (missing, 0) if self.pad_left else (0, missing)
        return {
            name: torch.from_numpy(np.pad(array, widths, constant_values=fill))
            for name, (array, fill) in values.items()
        }

    def _open(self, name: str, dtype: Any) -> np.ndarray:
        if name not in self._files:
            self._files[name] = np.memmap(self.folder / f"{self.part}.{name}", dtype, "r")
        return self._files[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}
