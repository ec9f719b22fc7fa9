# SPDX-License-Identifier: Apache-2.0
"""The progress of a comparison says which run of how many it is at, and how long yet."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from mprecipes.tools.compare_plan import ArmPlan, Job
from mprecipes.tools.compare_watch import Watch


class Clock:
    """Seconds that pass only when a test says so."""

    now = 100.0

    def __call__(self):
        return self.now


JOBS = [Job(ArmPlan(mode, mode), seed, Path(f"{mode}-{seed}"), [])
        for seed in (0, 1) for mode in ("fp32", "bf16")]  # fmt: skip


@pytest.fixture
def clock():
    return Clock()


def watching(clock, **options):
    console = Console(file=io.StringIO(), width=120, **options)
    return Watch(console, JOBS, 60, clock=clock), console


def test_lines_where_there_is_no_terminal(clock):
    """A line at the beginning, at most one in ten seconds, and one at the end."""
    watch, console = watching(clock)
    with watch:
        watch.begin(JOBS[0])
        for step in range(1, 31):
            clock.now += 1
            watch.record(JOBS[0], {"step": step, "loss": "3.25"})
        watch.end(JOBS[0], "finished", 60.0)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "run 1 of 4: fp32, seed 0  starting  time left: unknown yet"
    assert lines[1] == "run 1 of 4: fp32, seed 0  step 10/60  loss 3.2500  time left: 3:50"
    assert lines[-1] == "run 1 of 4: fp32, seed 0: finished after 60.0 s"
    assert len(lines) == 5


def test_the_time_left_knows_each_arm(clock):
    """FP32 takes 100 s, BF16 50 s: with one FP32 and one BF16 to go, 150 s."""
    watch, _ = watching(clock)
    for job, seconds in zip(JOBS[:2], (100.0, 50.0)):
        watch.begin(job)
        watch.end(job, "finished", seconds)
    assert watch.seconds_left() == 150.0
    watch.begin(JOBS[2])
    clock.now += 40
    assert watch.seconds_left() == 110.0


def test_runs_at_the_same_time_share_the_wait(clock):
    """On two devices half of it."""
    watch = Watch(None, JOBS, 60, slots=2, clock=clock)
    watch.begin(JOBS[0])
    watch.end(JOBS[0], "finished", 100.0)
    assert watch.seconds_left() == 150.0


def test_a_run_of_before_teaches_nothing_about_time(clock):
    """It was not launched now."""
    watch, console = watching(clock)
    watch.end(JOBS[0], "finished", None)
    assert watch.seconds_left() is None
    assert "run 1 of 4: fp32, seed 0: finished before" in console.file.getvalue()


def test_the_live_table(clock):
    """Arms down, seeds across, each cell its state."""
    watch, console = watching(clock, force_terminal=True)
    watch.begin(JOBS[1])
    watch.record(JOBS[1], {"step": 20, "loss": 2.5})
    watch.end(JOBS[0], "out_of_memory", 3.0)
    console.print(watch.picture())
    text = console.file.getvalue()
    for part in ("seed 0", "seed 1", "out_of_memory", "20/60  2.5000", "waiting", "run 2 of 4"):
        assert part in text
