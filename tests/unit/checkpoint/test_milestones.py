# SPDX-License-Identifier: Apache-2.0
"""Named copies: whole, verified, permanent, and never in the place of another."""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from mprecipes.checkpoint.milestones import (
    check_name,
    copy_file,
    make_milestone,
    read_milestones,
    sweep,
)
from mprecipes.errors import CheckpointError, ConfigError, VerificationError
from tests.kept import TENSORS, Folder, contents, flip, write_checkpoint


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_a_milestone_is_a_real_copy(folder):
    """Every byte is there again, in other files, and sha256sum agrees; a note says whence."""
    source = folder.save(500)
    made = make_milestone(source, folder.milestones, "pretrain-end")
    assert made.folder == folder.milestones / "pretrain-end"
    assert contents(made.folder) == contents(source.folder)
    for name in contents(source.folder):
        assert not os.path.samefile(made.folder / name, source.folder / name)
    check = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=made.folder, check=False).returncode == 0
    note = json.loads((folder.milestones / "pretrain-end.json").read_text())
    assert note["name"] == "pretrain-end"
    assert note["step"] == 500
    assert note["copied_from"] == "checkpoints/step-00000500"
    assert note["root_sha256"] == source.root_sha256
    assert note["method"] in ("reflink", "copy")
    shutil.rmtree(source.folder)
    assert folder.steps("milestones") == [500]
    assert list(read_milestones(folder.milestones)) == ["pretrain-end"]


def test_the_same_again_changes_nothing(folder):
    """A milestone of this step under this name is kept as it is, and its note is made up for."""
    source = folder.save(5)
    made = make_milestone(source, folder.milestones, "end")
    (folder.milestones / "end.json").unlink()
    before = (made.folder / TENSORS).stat()
    assert make_milestone(source, folder.milestones, "end") == made
    assert (made.folder / TENSORS).stat() == before
    assert json.loads((folder.milestones / "end.json").read_text())["step"] == 5


def test_another_steps_name_is_refused(folder):
    """A name that is taken stays what it was; the message says whose it is."""
    make_milestone(folder.save(5), folder.milestones, "end")
    before = contents(folder.milestones / "end")
    with pytest.raises(ConfigError) as caught:
        make_milestone(folder.save(6), folder.milestones, "end")
    assert caught.value.found == "a milestone of step 5 has this name"
    assert "this step 6" in caught.value.expected
    assert caught.value.where == "milestones/end"
    assert "another name" in caught.value.action
    assert contents(folder.milestones / "end") == before


def test_a_damaged_milestone_is_not_taken_for_made(folder):
    """The same step under the same name is refused when what is there does not verify."""
    source = folder.save(5)
    made = make_milestone(source, folder.milestones, "end")
    flip(made.folder / TENSORS)
    with pytest.raises(VerificationError) as caught:
        make_milestone(source, folder.milestones, "end")
    assert TENSORS in caught.value.found and "weights/layer.weight" in caught.value.found
    assert caught.value.where == "milestones/end"
    assert caught.value.expected and caught.value.action


def test_a_damaged_checkpoint_becomes_no_milestone(folder):
    """Nothing is published, and the message names the checkpoint's file and its tensors."""
    source = folder.save(5)
    flip(source.folder / TENSORS)
    with pytest.raises(VerificationError) as caught:
        make_milestone(source, folder.milestones, "end")
    assert caught.value.where == "checkpoints/step-00000005"
    assert TENSORS in caught.value.found and "weights/layer.weight" in caught.value.found
    assert list(folder.milestones.iterdir()) == []


def test_a_checkpoint_that_changed_meanwhile_becomes_no_milestone(folder):
    """Another whole checkpoint in the same folder is not what was to be kept."""
    source = folder.save(5)
    shutil.rmtree(source.folder)
    write_checkpoint(source.folder, 5, salt=2.0)
    with pytest.raises(CheckpointError) as caught:
        make_milestone(source, folder.milestones, "end")
    assert "changed meanwhile" in caught.value.found
    assert list(folder.milestones.iterdir()) == []


@pytest.mark.parametrize("point", ["before_copy", "after_copy", "before_publish"])
def test_an_error_publishes_nothing(folder, monkeypatch, point):
    """A full or failing disk at any point leaves no folder, and a later try succeeds."""
    source = folder.save(5)
    monkeypatch.setenv("MPRECIPES_FAULT", f"enospc@milestone.{point}:5")
    with pytest.raises(CheckpointError) as caught:
        make_milestone(source, folder.milestones, "end")
    assert "No space" in caught.value.found or "planted" in caught.value.found
    assert caught.value.where == "milestones/end"
    assert caught.value.expected == "a durable copy of step-00000005"
    assert "mprecipes milestone RUN 5 end" in caught.value.action
    assert list(folder.milestones.iterdir()) == []
    monkeypatch.delenv("MPRECIPES_FAULT")
    make_milestone(source, folder.milestones, "end")
    assert folder.steps("milestones") == [5]


def test_a_left_over_copy_is_swept_and_replaced(folder):
    """What a dead process left is no milestone, is removed, and does not stand in the way."""
    source = folder.save(5)
    left = folder.milestones / ".staging-end"
    left.mkdir(parents=True)
    (left / TENSORS).write_bytes(b"half")
    assert read_milestones(folder.milestones) == {}
    make_milestone(source, folder.milestones, "end")
    left.mkdir()
    sweep(folder.milestones)
    assert sorted(path.name for path in folder.milestones.iterdir()) == ["end", "end.json"]
    sweep(folder.path / "absent")


@pytest.mark.parametrize("name", ["pretrain-end", "a", "v1.0_rc", "A" * 64, "step-00000500"])
def test_names(name):
    """Letters, digits, dot, underscore and hyphen."""
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "-x", "a/b", "../x", "a b", "A" * 65, "x.json", "\u00e9"]
)
def test_other_names_are_refused(folder, name):
    """A name that leaves the folder, hides, or would be mistaken is refused before anything."""
    with pytest.raises(ConfigError) as caught:
        make_milestone(folder.save(1), folder.milestones, name)
    assert caught.value.where == "name of a milestone"
    assert "letters, digits" in caught.value.expected
    assert caught.value.found and caught.value.action
    assert not folder.milestones.exists()


@pytest.mark.parametrize("size", [0, 1, (3 << 20) + 7])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_files_are_copied_on_one_and_between_two_file_systems(tmp_path, size, elsewhere):
    """By reflink or copy, also to memory, where neither reflink nor copy_file_range works."""
    source = tmp_path / "source"
    source.write_bytes(os.urandom(size))
    place = "/dev/shm" if elsewhere and os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place) as other:
        target = Path(other) / "copy"
        assert copy_file(source, target) in ("reflink", "copy")
        digest = hashlib.sha256(source.read_bytes()).digest()
        assert hashlib.sha256(target.read_bytes()).digest() == digest
        with pytest.raises(FileExistsError):
            copy_file(source, target)


def test_links_are_not_copied(tmp_path):
    """A link in a checkpoint's folder is refused, not followed."""
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError):
        copy_file(tmp_path / "link", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
