# SPDX-License-Identifier: Apache-2.0
"""One rank dies in a step, a save or a load: the others end in time, the next launch recovers."""

import itertools

import pytest

from tests.reading import checkpoint_steps, journal, outcomes

pytestmark = pytest.mark.launch
ENGINES = ("cpu", "fsdp2", "zero1", "zero2", "zero3")
# where rank 1 dies, and what is left: steps of the journal, the newest checkpoint
PLACES = {
    "step": ("kill@step:5@rank1", 3),
    "save": ("kill@save.after_file:6@rank1", 3),
    "load": ("kill@restore.after_read:3@rank1", 3),
}
COVERING = [("fsdp2", "save")]
REST = [case for case in itertools.product(ENGINES, PLACES) if case not in COVERING]


def check(train, folder, engine, place):
    run, (fault, newest) = folder / "run", PLACES[place]
    options = {"max_steps": 8, "save_steps": 3}
    if place == "load":
        done = train(run, engine, 2, env={"MPRECIPES_FAULT": "kill@step:4"}, **options)
        assert done.returncode != 0
    done = train(run, engine, 2, env={"MPRECIPES_FAULT": fault}, **options)
    assert done.returncode != 0 and done.seconds < 120, done.output
    assert checkpoint_steps(run) == [newest]
    done = train(run, engine, 2, **options)
    assert done.returncode == 0, done.output
    assert list(journal(run)) == list(range(1, 9))
    assert outcomes(run)[-1] == "finished"
    assert checkpoint_steps(run)[-1] == 8


@pytest.mark.parametrize(("engine", "place"), COVERING)
def test_the_others_end_and_the_run_goes_on(train, tmp_path, engine, place):
    """FSDP2 in a save."""
    check(train, tmp_path, engine, place)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "place"), REST)
def test_every_other_engine_and_place(train, tmp_path, engine, place):
    """Steps, saves and loads on all engines."""
    check(train, tmp_path, engine, place)
