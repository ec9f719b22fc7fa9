# SPDX-License-Identifier: Apache-2.0
"""When a run wants to save."""

import pytest

from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.checkpoint.schedule import SaveSchedule


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def make(tmp_path):
    def schedule(writes_here=True, **policy):
        clock = Clock()
        file = tmp_path / "SAVE"
        return SaveSchedule(
            CheckpointPolicy(**policy), file, writes_here=writes_here, clock=clock
        ), clock

    return schedule


def test_every_so_many_steps(make):
    """On every rank alike."""
    schedule, _ = make(save_steps=4, writes_here=False)
    assert [step for step in range(1, 13) if schedule.is_due(step)] == [4, 8, 12]


def test_a_milestone_is_saved_between_two_saves(make):
    """On every rank alike; else a step that save_steps does not meet would never become one."""
    schedule, _ = make(save_steps=4, milestone_steps=(6, 8), writes_here=False)
    assert [step for step in range(1, 13) if schedule.is_due(step)] == [4, 6, 8, 12]


def test_after_so_many_minutes(make):
    """Counted from the last save, on the main process alone."""
    schedule, clock = make(save_steps=1000, save_minutes=2.0)
    clock.now = 119.0
    assert not schedule.is_due(1)
    clock.now = 120.0
    assert schedule.is_due(2)
    schedule.begun()
    assert not schedule.is_due(3)
    clock.now = 240.0
    assert schedule.is_due(4)
    other, clock = make(save_steps=1000, save_minutes=2.0, writes_here=False)
    clock.now = 1000.0
    assert not other.is_due(1)


def test_when_somebody_asks(make, tmp_path):
    """A file SAVE asks for one save; it is looked for once a second and gone when it begins."""
    schedule, clock = make(save_steps=1000)
    assert not schedule.is_due(1)
    (tmp_path / "SAVE").touch()
    clock.now = 0.5
    assert not schedule.is_due(2)
    clock.now = 1.0
    assert schedule.is_due(3)
    schedule.begun()
    assert not (tmp_path / "SAVE").exists()
    assert not schedule.is_due(4)
