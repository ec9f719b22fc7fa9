# SPDX-License-Identifier: Apache-2.0
"""A new disk gets its newest good checkpoint from the mirror; nothing else is taken for one."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from mprecipes.checkpoint.abandoned import abandon
from mprecipes.checkpoint.fetching import fetch_from_mirror
from mprecipes.checkpoint.mirror import Mirror
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.errors import CheckpointError, ConfigError, NoTrustedCheckpoint
from tests.kept import TENSORS, Folder, contents, flip


@pytest.fixture
def home(tmp_path):
    """A mirror with rolling checkpoints 4 and 8 and a milestone of step 6, and its policy."""
    run = Folder(tmp_path / "first" / "mine")
    url = f"file://{tmp_path}/mirror"
    mirror = Mirror(url, run.path)
    for step in (4, 8):
        mirror.push(run.save(step), "checkpoints", f"step-{step:08d}", lambda _: None)
    mirror.push(run.save(6), "milestones", "half", lambda _: None)
    mirror.claim(run.run_id)
    return tmp_path / "mirror" / "mine", CheckpointPolicy(mirror=url), run


@pytest.fixture
def new(tmp_path):
    """The same run folder on an empty disk: another run id."""
    return Folder(tmp_path / "second" / "mine", run_id="ffffffffffff")


def test_the_newest_comes_back(home, new, caplog):
    """It is published here byte for byte, and the mirror is this run's from now on."""
    _, policy, run = home
    manifest = fetch_from_mirror(new, policy)
    assert manifest is not None and manifest.step == 8
    assert manifest.folder == new.checkpoints / "step-00000008"
    assert contents(manifest.folder) == contents(run.checkpoints / "step-00000008")
    assert [path.name for path in new.checkpoints.iterdir()] == ["step-00000008"]
    assert "fetching" in caplog.text and "step 8 was fetched" in caplog.text
    owner = Mirror(policy.mirror, new.path).owner()
    assert owner == {"writer": new.run_id, "run_ids": [run.run_id, new.run_id]}


def test_damaged_ones_are_passed_over(home, new, caplog):
    """The next older one is taken, a milestone too, and the log says why."""
    folder, policy, _ = home
    flip(folder / "checkpoints" / "step-00000008" / TENSORS)
    manifest = fetch_from_mirror(new, policy)
    assert manifest is not None and manifest.step == 6
    assert new.steps() == [6]
    assert f"checkpoints/step-00000008: {TENSORS}: sha256" in caplog.text


def test_when_none_verifies_nothing_is_taken(home, new):
    """All are named with what is wrong, and no folder is left here."""
    folder, policy, _ = home
    flip(folder / "checkpoints" / "step-00000008" / TENSORS)
    flip(folder / "milestones" / "half" / "manifest.json")
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    with pytest.raises(NoTrustedCheckpoint) as caught:
        fetch_from_mirror(new, policy)
    assert "checkpoints/step-00000008" in caught.value.found
    assert "milestones/half: manifest.json" in caught.value.found
    assert caught.value.where == policy.mirror + "/mine"
    assert caught.value.expected and caught.value.action
    assert new.steps() == []


def test_without_a_mirror_or_with_an_empty_one_there_is_nothing(home, new, tmp_path):
    """The run starts at step 0."""
    assert fetch_from_mirror(new, CheckpointPolicy()) is None
    empty = CheckpointPolicy(mirror=f"file://{tmp_path}/empty")
    assert fetch_from_mirror(new, empty) is None
    assert not new.path.exists()


def test_a_mirror_that_does_not_answer_stops_the_start(home, new):
    """Starting from step 0 in silence would be the worst answer."""
    folder, policy, _ = home
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    with pytest.raises(CheckpointError) as caught:
        fetch_from_mirror(new, policy)
    assert "NotADirectoryError" in caught.value.found
    assert caught.value.where == policy.mirror + "/mine"
    assert "a checkpoint from the mirror" in caught.value.expected
    assert "launch again" in caught.value.action


def test_another_runs_mirror_is_refused_once_this_one_has_trained(home, new):
    """A run with a journal of its own does not go on from another run's checkpoint."""
    _, policy, _ = home
    (new.path / "journal").mkdir(parents=True)
    (new.path / "journal" / "attempt-0000.jsonl").write_text("")
    with pytest.raises(ConfigError) as caught:
        fetch_from_mirror(new, policy)
    assert caught.value.found == "run 0123456789ab writes here"
    assert caught.value.expected == "a mirror of this run, ffffffffffff"
    assert caught.value.where and caught.value.action


def test_a_run_that_lost_its_checkpoints_gets_its_own_back(home):
    """With journal and run id kept, what the mirror has of this run is taken."""
    _, policy, run = home
    (run.path / "journal").mkdir()
    (run.path / "journal" / "attempt-0000.jsonl").write_text("")
    shutil.rmtree(run.checkpoints)
    manifest = fetch_from_mirror(run, policy)
    assert manifest is not None and manifest.step == 8


def test_a_full_disk_leaves_nothing_half(home, new, monkeypatch):
    """A fetch that cannot be written is refused as such and is not visible."""
    _, policy, _ = home
    new.path.mkdir(parents=True)
    new.checkpoints.write_text("not a folder")
    with pytest.raises(CheckpointError) as caught:
        fetch_from_mirror(new, policy)
    assert "free space" in caught.value.action


def test_all_is_durable_before_it_is_published(home, new, monkeypatch):
    """Every file and the staging folder are synced, and only then is the folder renamed."""
    _, policy, run = home
    events, fsync, rename = [], os.fsync, Path.rename

    def record_fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_rename(path, target):
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    assert fetch_from_mirror(new, policy) is not None
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    staging = new.checkpoints / f".staging-step-00000008-{new.run_id}"
    names = contents(run.checkpoints / "step-00000008").keys()
    assert sorted(before[:-1]) == sorted(staging / name for name in names)
    assert before[-1] == staging
    assert after == [new.checkpoints]


def test_too_little_space_is_refused_before_anything_is_written(home, new, monkeypatch):
    """With what is free and what is needed; no folder is left here."""
    _, policy, _ = home
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(5_000_000))
    with pytest.raises(CheckpointError) as caught:
        fetch_from_mirror(new, policy)
    assert caught.value.found == "5.0 MB are free on the disk of checkpoints/"
    assert caught.value.expected.startswith("16.8 MB: the measured 0.0 MB x 1.1 + 16.8 MB")
    assert caught.value.where == f"fetching {policy.mirror}/mine/checkpoints/step-00000008"
    assert "free space" in caught.value.action
    assert list(new.checkpoints.iterdir()) == []


def test_what_was_given_up_is_not_taken(home, new, caplog):
    """What the mirror says is abandoned is passed over, a milestone too, and nothing is fetched."""
    _, policy, run = home
    mirror = Mirror(policy.mirror, run.path)
    roots = {each.manifest.step: each.manifest.root_sha256 for each in mirror.published()}
    mirror.abandon([roots[8], roots[6]], ["a"])
    manifest = fetch_from_mirror(new, policy)
    assert manifest is not None and manifest.step == 4
    assert new.steps() == [4]
    assert "fetching" in caplog.text and "step-00000008: manifest.json: of a branch" in caplog.text
    assert mirror.abandoned() == ({roots[8], roots[6]}, {"a"})
    assert mirror.owner()["writer"] == new.run_id


def test_a_cut_that_the_mirror_does_not_know_yet_counts(home):
    """The run folder says what is abandoned as long as the mirror could not be told."""
    _, policy, run = home
    shutil.rmtree(run.checkpoints)
    abandon(run.path, [], from_step=5)
    manifest = fetch_from_mirror(run, policy)
    assert manifest is not None and manifest.step == 4


def test_one_from_before_a_step(home, new):
    """Newer ones are not even fetched; where there is none, all are named and none is published."""
    _, policy, _ = home
    manifest = fetch_from_mirror(new, policy, before=8)
    assert manifest is not None and manifest.step == 6
    assert new.steps() == [6]
    shutil.rmtree(new.checkpoints)
    with pytest.raises(NoTrustedCheckpoint) as caught:
        fetch_from_mirror(new, policy, before=4)
    assert "no checkpoint of the mirror from before step 4 verifies" in caught.value.found
    assert "step-00000008: manifest.json: step 8, expected a step before 4" in caught.value.found
    assert caught.value.expected.startswith("at least one from before step 4")
    assert not new.checkpoints.exists()
