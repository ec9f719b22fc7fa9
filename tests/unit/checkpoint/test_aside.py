# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a resume passes over."""

import json

import pytest

from mprecipes.checkpoint.aside import choose, set_aside
from mprecipes.errors import CheckpointError, ConfigError
from tests.kept import flip
from tests.toys import Run


@pytest.fixture
def run(tmp_path):
    """Steps 1 to 3, and milestone `first` of step 1."""
    made = Run(tmp_path, keep_last=5)
    made.train([1, 2, 3])
    made.manager.wait()
    return made


def aside(run):
    return sorted(path.name for path in (run.folder.path / "set_aside").glob("*"))


def test_what_there_is_a_reason_for_is_moved_whole(run):
    """Step 2 goes with its reason beside it; the others stay and are found."""
    path = run.folder.path
    moved = set_aside(
        path, run.folder.checkpoints, lambda m: "odd" if m.step == 2 else None, attempt=4
    )
    assert moved == [2]
    assert run.manager.candidates() == [3, 1]
    assert aside(run) == ["step-00000002", "step-00000002.reason.json"]
    reason = json.loads((path / "set_aside" / "step-00000002.reason.json").read_text())
    assert (reason["step"], reason["attempt"], reason["reason"]) == (2, 4, "odd")


def test_an_earlier_step_is_chosen_and_can_be_taken_back(run):
    """Later steps are set aside, none is lost; choosing one of them brings a copy back."""
    path, checkpoints = run.folder.path, run.folder.checkpoints
    assert choose(path, checkpoints, 1, attempt=1) == [3, 2]
    assert run.manager.candidates() == [1]
    assert run.manager.newest_trusted().step == 1
    assert choose(path, checkpoints, 3, attempt=2) == []
    assert run.manager.newest_trusted().step == 3
    assert "step-00000003" in aside(run)


def test_a_milestone_can_be_chosen_when_its_checkpoint_is_gone(run):
    """A verified copy of it becomes the newest checkpoint."""
    run.save(3, milestone="kept")
    run.manager.wait()
    path, checkpoints = run.folder.path, run.folder.checkpoints
    assert set_aside(path, checkpoints, lambda m: "gone", attempt=0) == [3, 2, 1]
    for folder in (path / "set_aside").glob("step-*[0-9]"):
        folder.rename(path / f"elsewhere-{folder.name}")
    choose(path, checkpoints, 3, attempt=1)
    assert run.manager.newest_trusted().step == 3
    assert (path / "milestones" / "kept").is_dir()


def test_a_copy_that_does_not_verify_is_passed_over_or_refused(run):
    """Of two that were set aside the good one comes back; with a damaged one nothing is moved."""
    path, checkpoints = run.folder.path, run.folder.checkpoints
    choose(path, checkpoints, 2, attempt=1)
    choose(path, checkpoints, 3, attempt=2)
    choose(path, checkpoints, 1, attempt=3)
    folders = [name for name in aside(run) if not name.endswith(".json")]
    assert folders == ["step-00000002", "step-00000003", "step-00000003.2"]
    flip(path / "set_aside" / "step-00000003.2" / "rank-00000.json")
    choose(path, checkpoints, 3, attempt=4)
    assert run.manager.newest_trusted().step == 3
    flip(path / "set_aside" / "step-00000002" / "rank-00000.json")
    before = run.names()
    with pytest.raises(ConfigError) as error:
        choose(path, checkpoints, 2, attempt=5)
    assert "--resume_from 2: set_aside/step-00000002: rank-00000.json: sha256" in error.value.found
    assert error.value.action.endswith("nothing was moved or copied")
    assert run.names() == before


def test_a_step_that_does_not_exist_is_refused(run):
    """What there is is named; nothing was moved."""
    with pytest.raises(ConfigError) as error:
        choose(run.folder.path, run.folder.checkpoints, 9, attempt=1)
    assert error.value.found == "--resume_from 9"
    assert error.value.expected == "the step of a checkpoint or milestone: 1, 2, 3"
    assert error.value.where == "resume_from"
    assert error.value.action.startswith("name one of these")
    assert run.manager.candidates() == [3, 2, 1]


def test_what_cannot_be_moved_ends_the_launch(run):
    """A file where the folder belongs: the error says what to do, and all stays."""
    (run.folder.path / "set_aside").write_text("in the way")
    with pytest.raises(CheckpointError) as error:
        set_aside(run.folder.path, run.folder.checkpoints, lambda m: "odd", attempt=1)
    assert error.value.found.startswith("step-00000003 could not be set aside")
    assert error.value.expected == "set_aside/ on the disk of checkpoints/, writable"
    assert error.value.where.endswith("step-00000003")
    assert error.value.action.startswith("move it out of checkpoints/ by hand")
    assert run.manager.candidates() == [3, 2, 1]
