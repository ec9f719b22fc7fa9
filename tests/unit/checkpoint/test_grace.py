# SPDX-License-Identifier: Apache-2.0
"""How long a stop takes is told at the start, after the first save, and when it grows too long."""

import pytest
import torch

from mprecipes.checkpoint.grace import Grace, measure_writing, state_bytes
from mprecipes.checkpoint.policy import CheckpointPolicy


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def make():
    def grace(seconds=None, looks=()):
        clock = Clock()
        made = Grace(CheckpointPolicy(preemption_grace_seconds=seconds), clock)
        for clock.now in looks:
            made.looked()
        return made

    return grace


def test_before_anything_was_saved(make):
    """1780 MB at 445 MB/s are 4 s, twice; 30 s are enough for that."""
    text = make().predicted(1_780_000_000, 445e6)
    assert text == (
        "a stop needs about 8.0 s, for a save and one in flight: "
        "1,780.0 MB at 445 MB/s, measured here"
    )


def test_after_the_first_save(make):
    """The longest of the steps between looks, the first not counted, and two saves; said once."""
    grace = make(looks=(100.0, 100.5, 103.5, 104.0))
    assert grace.measured(2.0) == (
        "a stop needs up to 7.0 s: a step or evaluation of 3.0 s,"
        " a save in flight and its own of 2.0 s each"
    )
    assert grace.measured(2.5) is None


def test_a_launcher_gives_thirty_seconds(make):
    """Longer than that is a warning that says whom to ask instead; once."""
    grace = make()
    assert "30 s: send SIGUSR1 to a rank" in grace.measured(15.5)
    assert grace.measured(16.0) is None


def test_a_known_grace_that_is_too_short(make):
    """Both numbers are named, at the start already, and later only if it was not said before."""
    early = make(seconds=5.0)
    assert "needs about 8.0 s" in (text := early.predicted(400, 100.0))
    assert "WARNING: preemption_grace_seconds is 5: ask earlier" in text
    assert "WARNING" not in early.measured(4.0)
    late = make(seconds=5.0, looks=(0.0, 1.0))
    assert "WARNING" not in late.measured(2.0)
    assert late.measured(2.0) is None
    assert "up to 5.2 s" in (text := late.measured(2.1))
    assert "WARNING: preemption_grace_seconds is 5" in text
    assert late.measured(2.1) is None


def test_the_size_of_a_state():
    """Before the first update AdamW's two moments are added, and never to what does not train."""
    weights = {"weights/w": torch.zeros(10), "weights/seen": torch.zeros((), dtype=torch.int64)}
    assert state_bytes(weights) == 48 + 80
    moments = {"optimizer/w/exp_avg": torch.zeros(10), "optimizer/w/exp_avg_sq": torch.zeros(10)}
    assert state_bytes(weights | moments) == 48 + 80


def test_writing_is_measured_and_leaves_nothing(tmp_path):
    """A positive rate; a folder that is not there has none."""
    assert measure_writing(tmp_path, 5000) > 0
    assert list(tmp_path.iterdir()) == []
    assert measure_writing(tmp_path / "absent", 5000) is None
