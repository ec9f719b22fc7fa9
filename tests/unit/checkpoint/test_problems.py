# SPDX-License-Identifier: Apache-2.0
"""What cannot be read for a while is not damaged: nothing is moved, and nothing older is taken."""

import contextlib
import errno
import os
from pathlib import Path

import pytest

from mprecipes.checkpoint import manifest as manifests
from mprecipes.checkpoint.manifest import verify_folder
from mprecipes.checkpoint.problems import Problem
from mprecipes.errors import CheckpointError, NoTrustedCheckpoint
from tests.toys import Run

TENSORS, MANIFEST = ".safetensors", "manifest.json"


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 1 and 2."""
    made = Run(tmp_path)
    made.train([1, 2])
    return made


@pytest.fixture
def failing(monkeypatch):
    """Gives a context in which no file with such a name can be opened."""

    @contextlib.contextmanager
    def plant(number, ending):
        real_open, real_read = os.open, Path.read_bytes

        def refuse(path):
            if str(path).endswith(ending):
                raise OSError(number, os.strerror(number))

        def opening(path, *args, **kwargs):
            refuse(path)
            return real_open(path, *args, **kwargs)

        def reading(path):
            refuse(path)
            return real_read(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", opening)
            patch.setattr(Path, "read_bytes", reading)
            yield

    return plant


def restored(run):
    """Step of the checkpoint that another process would go on from."""
    manifest, _ = Run(run.folder.path, seed=5).manager.restore_newest(lambda _: None)
    return manifest.step


@pytest.mark.parametrize("ending", [TENSORS, MANIFEST])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ETIMEDOUT])
def test_it_is_said_and_everything_stays(run, failing, number, ending):
    """The error names file, cause and checkpoint; when the disk is back the newest is restored."""
    with failing(number, ending), pytest.raises(CheckpointError) as raised:
        restored(run)
    error = raised.value
    assert f"unreadable ({os.strerror(number)})" in error.found
    assert ending in error.found
    assert error.where.startswith("checkpoints/step-0000000")
    assert "nothing was moved" in error.action
    assert run.names() == ["step-00000001", "step-00000002"]
    assert not run.folder.quarantine.exists()
    assert restored(run) == 2


@pytest.mark.parametrize("ending", [TENSORS, MANIFEST])
def test_a_bad_sector_is_damage(run, failing, ending):
    """EIO is what a disk says of its own bytes."""
    with failing(errno.EIO, ending), pytest.raises(NoTrustedCheckpoint):
        restored(run)
    found = [path.name for path in run.folder.quarantine.iterdir() if path.is_dir()]
    assert sorted(found) == ["step-00000001", "step-00000002"]


def test_verify_says_it_of_the_file(run, failing):
    """A report tells what could not be read, and goes on."""
    path = run.folder.checkpoints / "step-00000002"
    with failing(errno.ESTALE, MANIFEST):
        assert verify_folder(path) == [
            Problem(MANIFEST, "unreadable (Stale file handle)", "a readable file", (), True)
        ]
    assert manifests.read_manifest(path).step == 2
    assert verify_folder(path) == []
