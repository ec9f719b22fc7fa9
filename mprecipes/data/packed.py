# SPDX-License-Identifier: Apache-2.0
"""Rows of token ids in a memory-mapped file, as a map-style data set."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class PackedData(Dataset[dict[str, torch.Tensor]]):
    """Rows of a packed file as a map-style data set; opened lazily, so each worker maps it itself.

    Item: `input_ids` and `labels`, both `(seq_length,)` int64 and equal: the loss shifts them (the
    convention of Hugging Face), so that a row has `seq_length - 1` targets.
    """

    is_deterministic = True

    def __init__(
        self, path: Path, *, seq_length: int, dtype: str, num_rows: int, first_row: int = 0
    ) -> None:
        self.path, self.seq_length, self.dtype = path, seq_length, np.dtype(dtype)
        self.num_rows, self.first_row = num_rows, first_row
        self._map: np.ndarray | None = None

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[dict[str, torch.Tensor]]:
        """Gives the items of `rows`, read in one go."""
        index = np.asarray(rows, dtype=np.int64)
        if ((index < 0) | (index >= self.num_rows)).any():
            raise IndexError(f"rows {rows} of {self.num_rows} in {self.path}")
        if self._map is None:
            self._map = np.memmap(self.path, self.dtype, "r").reshape(-1, self.seq_length)
        block = torch.from_numpy(self._map[index + self.first_row].astype(np.int64))
        return [{"input_ids": ids, "labels": ids} for ids in block]

    def num_targets(self, rows: np.ndarray) -> int:
        """Gives the number of targets that enter the loss of these rows, without reading them."""
        return len(rows) * (self.seq_length - 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}
