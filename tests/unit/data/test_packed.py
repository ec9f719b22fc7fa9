# SPDX-License-Identifier: Apache-2.0
"""Rows of a packed file as a data set."""

import pickle

import numpy as np
import pytest
import torch

from mprecipes.data.packed import PackedData


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "train.bin"
    np.arange(24, dtype=np.uint16).tofile(path)
    return PackedData(path, seq_length=4, dtype="uint16", num_rows=5, first_row=1)


def test_an_item_is_a_row_with_its_labels(data):
    """Labels equal the ids (the loss shifts them), both int64, from the part's first row on."""
    item = data[0]
    assert item["input_ids"].tolist() == item["labels"].tolist() == [4, 5, 6, 7]
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert len(data) == 5


def test_many_items_are_read_at_once_in_the_order_asked(data):
    """Rows come in the order of the request, also twice."""
    rows = [item["input_ids"].tolist() for item in data.__getitems__([4, 0, 4])]
    assert rows == [[20, 21, 22, 23], [4, 5, 6, 7], [20, 21, 22, 23]]


@pytest.mark.parametrize("row", [5, -1])
def test_a_row_outside_the_part_is_refused(data, row):
    """The neighbouring part of the same file cannot be read by a wrong index."""
    with pytest.raises(IndexError, match="of 5"):
        data[row]


def test_targets_are_counted_without_reading(data):
    """A row of four tokens has three targets."""
    data.path.unlink()
    assert data.num_targets(np.array([0, 3])) == 6


def test_a_worker_maps_the_file_itself(data):
    """The data set travels without its map, also after it was read."""
    data[0]
    assert len(pickle.dumps(data)) < 1000
    assert pickle.loads(pickle.dumps(data))[1]["input_ids"].tolist() == [8, 9, 10, 11]


def test_wide_ids_are_kept(tmp_path):
    """Ids beyond sixteen bits come back as they were written."""
    path = tmp_path / "train.bin"
    np.array([70000, 2**32 - 1], dtype=np.uint32).tofile(path)
    data = PackedData(path, seq_length=2, dtype="uint32", num_rows=1)
    assert data[0]["input_ids"].tolist() == [70000, 4294967295]
