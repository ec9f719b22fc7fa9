# SPDX-License-Identifier: Apache-2.0
"""Verification finds every damaged file of every checkpoint of a run, newest first."""

import pytest

from mprecipes.errors import ConfigError
from mprecipes.tools.verify import newest_checkpoint, verify_path


@pytest.fixture
def run(tmp_path, folders):
    run = folders.run(tmp_path / "run", [(1, 12)], [4, 8, 12])
    folders.checkpoint(run / "milestones" / "half", 6, milestone="half")
    (run / "checkpoints" / ".staging-step-00000016-x").mkdir()
    (run / "quarantine" / "step-00000002").mkdir(parents=True)
    return run


def test_whole_run(run):
    """Checkpoints and milestones come newest first; staging and quarantine are not among them."""
    verdicts = verify_path(run)
    assert [(verdict.kind, verdict.step) for verdict in verdicts] == [
        ("checkpoint", 12), ("checkpoint", 8), ("milestone", 6), ("checkpoint", 4),
    ]  # fmt: skip
    assert all(verdict.verifies for verdict in verdicts)
    assert verdicts[0].num_files == 3
    assert verdicts[0].num_bytes > 0


def test_one_checkpoint(run):
    """A checkpoint's own path verifies that one."""
    (verdict,) = verify_path(run / "checkpoints" / "step-00000008")
    assert (verdict.step, verdict.verifies) == (8, True)
    (verdict,) = verify_path(run / "milestones" / "half")
    assert (verdict.kind, verdict.step) == ("milestone", 6)


@pytest.mark.parametrize(
    "name", ["tensors-rank00000-000.safetensors", "manifest.json", "SHA256SUMS"]
)
def test_flipped_bit_in_any_file(run, folders, name):
    """One flipped bit in any file of one checkpoint is one problem, named by its file."""
    folders.flip(run / "checkpoints" / "step-00000008" / name)
    bad = [verdict for verdict in verify_path(run) if not verdict.verifies]
    assert [verdict.path.name for verdict in bad] == ["step-00000008"]
    assert [problem.path for problem in bad[0].problems] == [name]


def test_damaged_manifest_comes_first(run, folders):
    """A checkpoint whose step cannot be known stands before all others, with its problem."""
    folders.flip(run / "checkpoints" / "step-00000004" / "manifest.json")
    first = verify_path(run)[0]
    assert (first.path.name, first.step, first.verifies) == ("step-00000004", None, False)
    assert first.to_dict()["problems"][0]["path"] == "manifest.json"


def test_missing_manifest_is_a_problem_of_a_checkpoint(run):
    """A checkpoint without a manifest does not verify, also when it is named itself."""
    folder = run / "checkpoints" / "step-00000012"
    (folder / "manifest.json").unlink()
    (verdict,) = verify_path(folder)
    assert not verdict.verifies


def test_run_without_checkpoints(tmp_path):
    """A run that has saved nothing gives no verdicts."""
    (tmp_path / "run.json").write_text("{}")
    assert verify_path(tmp_path) == []


@pytest.mark.parametrize("kind", ["absent", "file", "folder"])
def test_other_paths_are_refused(tmp_path, kind):
    """A path that is neither a checkpoint nor a run is refused: found, expected, where, action."""
    path = tmp_path / kind
    if kind == "file":
        path.write_text("x")
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(ConfigError) as caught:
        verify_path(path)
    found = {"absent": "no such folder", "file": "a file",
             "folder": "a folder with neither run.json nor manifest.json"}  # fmt: skip
    assert caught.value.found == found[kind]
    assert caught.value.expected == "the folder of a checkpoint or of a run"
    assert caught.value.where == str(path)
    assert "output_dir" in caught.value.action
    assert caught.value.exit_code == 2


def test_newest_is_by_manifest(run):
    """The newest checkpoint is the one whose manifest says so, whatever its folder is called."""
    folder = run / "checkpoints"
    (folder / "step-00000004").rename(folder / "step-00000099")
    newest = newest_checkpoint(run)
    assert newest is not None
    assert newest.name == "step-00000012"
    assert newest_checkpoint(run / "milestones") is None
