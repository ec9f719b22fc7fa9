# SPDX-License-Identifier: Apache-2.0
"""Keyed numbers and the items read under them."""

import os
import random
import signal

import numpy as np
import pytest
import torch

from mprecipes.data.keyed import (
    KeyedItems,
    kept_random_streams,
    mix64,
    numbered_keys,
    starting_workers,
)

RECORDED = [
    6332618229526065668,
    17630415256238047317,
    7067088624304863322,
]


def test_the_mix_is_splitmix64():
    """The first outputs for seed 0 are those of the published generator."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = np.arange(1, 4, dtype=np.uint64) * golden
    assert [hex(x) for x in mix64(state).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_keys_are_the_recorded_ones():
    """These numbers never change: a change would give every old run other draws."""
    keys = numbered_keys(42, np.array([0, 1, 2**40], dtype=np.uint64))
    assert keys.tolist() == RECORDED
    assert numbered_keys(42, np.array([1], dtype=np.uint64)).tolist() == RECORDED[1:2]
    assert numbered_keys(-1, np.array([0], dtype=np.uint64))[0] not in RECORDED


class Draws:
    """Every item is one draw of each host stream."""

    def __getitem__(self, row):
        draws = [random.random(), np.random.random(), torch.rand(()).item()]
        return {"row": torch.tensor(row), "draws": torch.tensor(draws, dtype=torch.float64)}


def test_draws_follow_sample_and_seed_not_row_or_company():
    """A sample number draws the same beside other samples; another number or seed differs."""
    items = KeyedItems(Draws(), seed=1)
    first, rows, batch = items.__getitems__([(7, 3), (8, 3)])
    _, _, alone = items.__getitems__([(8, 0)])
    _, _, other = KeyedItems(Draws(), seed=2).__getitems__([(8, 0)])
    assert (first, rows, batch["row"].tolist()) == (7, [3, 3], [3, 3])
    assert torch.equal(batch["draws"][1], alone["draws"][0])
    assert not (batch["draws"][0] == batch["draws"][1]).any()
    assert not (alone["draws"] == other["draws"]).any()


def test_a_deterministic_data_set_is_read_without_seeding():
    """What says that it draws nothing is read straight from the main process's streams."""

    class Declared(Draws):
        is_deterministic = True

    torch.manual_seed(5)
    expected = torch.rand(()).item()
    torch.manual_seed(5)
    _, _, batch = KeyedItems(Declared(), seed=1).__getitems__([(0, 0)])
    assert batch["draws"][0, 2].item() == expected


def test_items_are_read_in_one_go_where_the_data_set_can():
    """A data set with `__getitems__` gets all rows of a batch at once."""

    calls = []

    class Together:
        is_deterministic = True

        def __getitems__(self, rows):
            calls.append(rows)
            return [{"row": torch.tensor(row)} for row in rows]

    _, _, batch = KeyedItems(Together(), seed=0).__getitems__([(0, 4), (1, 2)])
    assert calls == [[4, 2]]
    assert batch["row"].tolist() == [4, 2]


def test_streams_are_put_back_after_an_error():
    """Whatever happens inside, the three host streams continue as if nothing was drawn."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with pytest.raises(KeyError), kept_random_streams():
        random.random(), np.random.random(), torch.rand(3)
        raise KeyError
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after


def test_the_environment_is_left_as_it_was(monkeypatch):
    """The variable for forked workers is set only while they start, and never overridden."""
    name = "TOKENIZERS_PARALLELISM"
    monkeypatch.delenv(name, raising=False)
    with starting_workers():
        assert os.environ[name] == "false"
    assert name not in os.environ
    monkeypatch.setenv(name, "true")
    with starting_workers():
        assert os.environ[name] == "true"
    assert os.environ[name] == "true"


def test_a_stop_signal_waits_until_the_workers_are_started():
    """A signal that comes while workers start is kept, not lost, and delivered behind the block."""
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("USR1"))
    try:
        with starting_workers():
            signal.raise_signal(signal.SIGUSR1)  # to this thread: others of the process may be open
            assert heard == []
        assert heard == ["USR1"]
    finally:
        signal.signal(signal.SIGUSR1, before)
