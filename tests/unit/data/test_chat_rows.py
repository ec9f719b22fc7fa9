# SPDX-License-Identifier: Apache-2.0
"""Rows of conversations read back from their files."""

import pickle

import numpy as np
import pytest

from mprecipes.data.chat_rows import ChatRows, write_rows
from mprecipes.data.fitting import Piece

PIECES = [
    Piece(np.array([1, 2, 3], np.uint16), np.array([False, True, True])),
    Piece(np.array([4, 5], np.uint16), np.array([False, True])),
    Piece(np.array([6, 7, 8, 9], np.uint16), np.array([False, False, False, True])),
]


@pytest.fixture
def rows(tmp_path):
    write_rows(tmp_path, "train", PIECES, [[0, 1], [2]])

    def opened(**options):
        layout = {"seq_length": 6, "dtype": "uint16", "pad_id": 0}
        return ChatRows(tmp_path, "train", **{**layout, **options})

    return opened


def listed(item):
    return {name: tensor.tolist() for name, tensor in item.items()}


def test_a_packed_row(rows):
    """Two pieces: positions restart, segments count, what is not learned is -100."""
    assert listed(rows()[0]) == {
        "input_ids": [1, 2, 3, 4, 5, 0],
        "labels": [-100, 2, 3, -100, 5, -100],
        "position_ids": [0, 1, 2, 0, 1, 0],
        "segment_ids": [0, 0, 0, 1, 1, -1],
    }


def test_padding_on_the_left(rows):
    """The same row filled up before it."""
    assert listed(rows(pad_left=True)[0])["segment_ids"] == [-1, 0, 0, 0, 1, 1]
    assert listed(rows(pad_left=True)[0])["labels"] == [-100, -100, 2, 3, -100, 5]


def test_unpacked_rows_are_as_long_as_the_longest_asked_for(rows):
    """Rows read together have one length; alone, their own."""
    data = rows(packed=False)
    assert [len(item["input_ids"]) for item in data.__getitems__([0, 1])] == [5, 5]
    assert listed(data[1])["input_ids"] == [6, 7, 8, 9]


def test_targets_and_lengths_without_reading(rows):
    """Each row's targets and tokens are known, through an index too."""
    data = rows(index=np.array([1, 0, 1]))
    assert (len(data), data.lengths.tolist()) == (3, [4, 5, 4])
    assert data.num_targets(np.array([0, 1, 2])) == 1 + 3 + 1
    assert data.num_targets(np.array([1])) == 3
    assert (data[1]["labels"] != -100).sum() == 3


def test_rows_outside_and_copies_for_workers(rows):
    """A row that is not there is an error; a pickled copy opens its files anew."""
    data = rows()
    with pytest.raises(IndexError):
        data[2]
    with pytest.raises(IndexError):
        data[-1]
    copy = pickle.loads(pickle.dumps(data))
    assert copy._files == {}
    assert listed(copy[1]) == listed(data[1])
