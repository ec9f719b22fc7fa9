# SPDX-License-Identifier: Apache-2.0
"""The published checkpoints of a run on one disk."""

import json
import logging
import shutil

import pytest

from mprecipes.checkpoint.manifest import Problem
from mprecipes.checkpoint.shelf import Shelf, step_name
from tests.toys import Run

SOME = [Problem("x", "found this", "expected that")]


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path, keep_last=9)
    run.train([1, 2, 3])
    return run


@pytest.fixture
def shelf(run):
    return Shelf(run.folder.checkpoints, run.folder.quarantine, "0123456789ab")


def steps(shelf):
    return [manifest.step for manifest in shelf.scan()[0]]


def test_names_sort_as_numbers():
    """Eight digits, more where a step needs them."""
    assert step_name(500) == "step-00000500"
    assert step_name(123456789) == "step-123456789"


def test_absent_folders_hold_nothing(tmp_path):
    """A run that has saved nothing yet has no folders and no checkpoints."""
    shelf = Shelf(tmp_path / "checkpoints", tmp_path / "quarantine", "id")
    assert shelf.scan() == ([], [])
    assert shelf.quarantined() == []
    shelf.sweep()
    assert list(tmp_path.iterdir()) == []


def test_scan_goes_by_manifests_and_leaves_other_folders_alone(run, shelf):
    """Renamed and copied checkpoints count by their step; a stranger's folder and files do not."""
    folder = run.folder.checkpoints
    (folder / "step-00000003").rename(folder / "before-lunch")
    shutil.copytree(folder / "step-00000002", folder / "copy")
    (folder / "notes").mkdir()
    (folder / "step-backup").mkdir()
    (folder / "step-list.txt").write_text("1 2 3")
    (folder / "step-00000009").mkdir()
    found, broken = shelf.scan()
    assert [(manifest.step, manifest.folder.name) for manifest in found] == [
        (3, "before-lunch"),
        (2, "step-00000002"),
        (2, "copy"),
        (1, "step-00000001"),
    ]
    assert [(name, problem.path) for name, problem in broken] == [
        ("step-00000009", "manifest.json")
    ]


def test_make_room_gives_an_empty_staging_folder(shelf):
    """What a dead save left there is gone."""
    left = shelf.staging(4) / "left.bin"
    left.parent.mkdir()
    left.write_bytes(b"x")
    assert shelf.make_room(4) is None
    assert shelf.staging(4).name == ".staging-step-00000004-0123456789ab"
    assert list(shelf.staging(4).iterdir()) == []


def test_make_room_keeps_a_good_checkpoint_of_the_step(shelf):
    """A published step is given back by name and nothing is staged."""
    assert shelf.make_room(2) == "step-00000002"
    assert not shelf.staging(2).exists()


@pytest.mark.parametrize("file", ["rank-00000.json", "manifest.json"])
def test_make_room_moves_a_damaged_one_away(run, shelf, file):
    """The name of the step is free afterwards, and nothing was deleted."""
    path = run.folder.checkpoints / "step-00000002" / file
    path.write_bytes(path.read_bytes()[:-1])
    assert shelf.make_room(2) is None
    assert steps(shelf) == [3, 1]
    assert shelf.quarantined() == ["step-00000002"]


def test_set_aside_says_why_and_never_writes_over(run, shelf, caplog):
    """The reason stands beside the folder; a second of the same name gets a number."""
    for _ in range(2):
        copy = run.folder.checkpoints / "copy"
        shutil.copytree(run.folder.checkpoints / "step-00000001", copy)
        shelf.set_aside(copy, SOME)
    assert shelf.quarantined() == ["copy", "copy.2"]
    reason = json.loads((run.folder.quarantine / "copy.2.reason.json").read_text())
    assert reason["folder"] == "copy"
    assert reason["problems"] == [
        {"path": "x", "found": "found this", "expected": "expected that", "tensors": []}
    ]
    assert shelf.counts["quarantined"] == 2
    assert "copy is refused and now quarantine/copy.2: x: found this" in caplog.text


def delete(shelf, step):
    return shelf.delete(next(each for each in shelf.scan()[0] if each.step == step))


def test_delete_leaves_nothing(run, shelf):
    """Nothing is left of a deleted checkpoint, not even a hidden folder."""
    assert delete(shelf, 1) is True
    assert run.names() == ["step-00000002", "step-00000003"]
    assert shelf.counts["deleted"] == 1


def test_delete_spares_names_of_others(run, shelf):
    """A checkpoint under another name than the one we gave it is somebody's own."""
    (run.folder.checkpoints / "step-00000002").rename(run.folder.checkpoints / "mine")
    assert delete(shelf, 2) is False
    assert "mine" in run.names()


@pytest.mark.parametrize("point", ["retention.before_delete", "retention.after_rename"])
def test_delete_counts_what_it_cannot_delete(run, shelf, monkeypatch, caplog, point):
    """An error ends nothing: it is logged and counted, and what is left is swept later."""
    monkeypatch.setenv("MPRECIPES_FAULT", f"eio@{point}:1")
    assert delete(shelf, 1) is (point == "retention.after_rename")
    assert steps(shelf) == ([3, 2] if point == "retention.after_rename" else [3, 2, 1])
    assert shelf.counts["cleanup_errors"] == 1
    assert "step-00000001 could not be removed" in caplog.text
    shelf.sweep()
    assert not [name for name in run.names() if name.startswith(".")]


def test_sweep_removes_only_what_is_half_made(run, shelf):
    """Staging and trash go; published ones and other hidden files stay."""
    shelf.make_room(7)
    (run.folder.checkpoints / ".trash-step-00000001-x").mkdir()
    (run.folder.checkpoints / ".keep").mkdir()
    shelf.sweep()
    assert run.names() == [".keep", "step-00000001", "step-00000002", "step-00000003"]


def test_remove_is_quiet_about_what_is_not_there(shelf, caplog):
    """Removing nothing is no error."""
    caplog.set_level(logging.WARNING)
    shelf.remove(shelf.checkpoints / "absent")
    assert caplog.text == ""
    assert shelf.counts["cleanup_errors"] == 0
