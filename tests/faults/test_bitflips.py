# SPDX-License-Identifier: Apache-2.0
"""Damage to the newest checkpoint: refused by name, put aside, and the one before is taken."""

import hashlib
import json

import pytest
import torch

from mprecipes.checkpoint.digests import state_digests
from mprecipes.checkpoint.manifest import verify_folder
from mprecipes.checkpoint.snapshot import live_tensors
from mprecipes.errors import NoTrustedCheckpoint
from mprecipes.identity.files import canonical_json
from tests.toys import Run

FILES = [
    "tensors-rank00000-000.safetensors",
    "rank-00000.json",
    "SHA256SUMS",
    "manifest.json",
]


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    run.train([4, 8])
    return run


def newest(run):
    return run.folder.checkpoints / "step-00000008"


def flip(path, position, bit):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def rewrite(run, change):
    """Changes the newest manifest and gives it a right root digest, as a careful enemy would."""
    path = newest(run) / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    rest = {key: value for key, value in values.items() if key != "root_sha256"}
    values["root_sha256"] = hashlib.sha256(canonical_json(rest)).hexdigest()
    path.write_text(json.dumps(values, indent=1) + "\n")


def assert_falls_back(run, file):
    """A new launch refuses the newest by the file's name and restores the one before, exactly."""
    again = Run(run.folder.path, seed=77)
    again.manager.sweep()
    manifest = again.manager.newest_trusted()
    assert manifest.step == 4
    assert [refusal.name for refusal in again.manager.refusals] == ["step-00000008"]
    assert file in [problem.path for problem in again.manager.refusals[0].problems]
    reason = json.loads((run.folder.quarantine / "step-00000008.reason.json").read_text())
    assert file in [problem["path"] for problem in reason["problems"]]
    assert again.names() == ["step-00000004"]
    assert (run.folder.quarantine / "step-00000008").is_dir()
    again.manager.restore(manifest)
    assert state_digests(live_tensors(again.model, again.optimizer)) == manifest.state_digests


def test_these_are_all_the_files(run):
    """The list below leaves no file of a checkpoint out."""
    assert sorted(path.name for path in newest(run).iterdir()) == sorted(FILES)


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("file", FILES)
def test_one_flipped_bit_in_any_file(run, file, where):
    """First, middle and last byte of each file in turn."""
    path = newest(run) / file
    size = path.stat().st_size
    position = min(int(where * size), size - 1)
    flip(path, position, bit=position % 8)
    assert_falls_back(run, file)


def test_every_bit_of_the_manifest_and_of_the_sums(run):
    """No flipped bit of the two text files goes unseen, white space and letter case included."""
    for file in ("manifest.json", "SHA256SUMS"):
        path = newest(run) / file
        data = path.read_bytes()
        for position in range(len(data)):
            changed = bytearray(data)
            changed[position] ^= 1 << (position % 8)
            path.write_bytes(changed)
            assert verify_folder(newest(run)), (file, position)
            changed[position] = data[position] ^ 0x20  # upper and lower case, space and NUL
            path.write_bytes(changed)
            assert verify_folder(newest(run)), (file, position)
        path.write_bytes(data)
    assert verify_folder(newest(run)) == []


@pytest.mark.parametrize("file", FILES)
def test_with_one_checkpoint_nothing_is_trusted(tmp_path, file):
    """When the only checkpoint is damaged the run does not quietly begin again."""
    run = Run(tmp_path)
    run.train([8])
    path = newest(run) / file
    flip(path, path.stat().st_size // 2, bit=3)
    again = Run(tmp_path)
    with pytest.raises(NoTrustedCheckpoint) as caught:
        again.manager.newest_trusted()
    assert f"step-00000008: {file}: " in caught.value.found
    assert caught.value.expected == "at least one whose every byte agrees with its manifest"
    assert caught.value.where == "checkpoints/"
    assert "quarantine/" in caught.value.action
    with pytest.raises(NoTrustedCheckpoint, match="quarantine/step-00000008: refused earlier"):
        Run(tmp_path).manager.newest_trusted()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "missing"])
def test_other_damage_to_any_file(run, file, damage):
    """Cut, extended, emptied and removed files are refused like changed ones."""
    path = newest(run) / file
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": data[:-1], "longer": data + b"\0", "empty": b""}[damage])
    assert_falls_back(run, file)


def test_a_file_too_many(run):
    """A file nobody listed makes the checkpoint one nobody wrote."""
    (newest(run) / "extra.safetensors").write_bytes(b"")
    assert_falls_back(run, "extra.safetensors")


def test_a_file_replaced_by_a_link(run):
    """A link is refused even when it leads to the right bytes."""
    path = newest(run) / "rank-00000.json"
    target = run.folder.path / "moved.json"
    path.rename(target)
    path.symlink_to(target)
    assert_falls_back(run, "manifest.json")
    assert "is a symbolic link" in _reason(run)


@pytest.mark.parametrize("path", ["../step-00000004/rank-00000.json", "/etc/hostname", ".."])
def test_a_manifest_that_leads_out_of_its_folder(run, path):
    """Climbing and absolute paths are refused under a right root digest."""
    rewrite(run, lambda values: values["files"][0].update(path=path))
    assert_falls_back(run, "manifest.json")
    assert f"the path {path!r}" in _reason(run)


def test_an_unknown_schema(run):
    """A checkpoint of another version is put aside unharmed, and the message says whose it is."""
    rewrite(run, lambda values: values.update(schema=2))
    assert_falls_back(run, "manifest.json")
    assert "schema 2" in _reason(run)


def test_doubled_entries(run):
    """A file listed twice is refused."""
    rewrite(run, lambda values: values["files"].append(values["files"][0]))
    assert_falls_back(run, "manifest.json")
    assert "listed more than once" in _reason(run)


def test_a_manifest_of_another_checkpoint(run):
    """An intact manifest over other files is no checkpoint."""
    source = run.folder.checkpoints / "step-00000004" / "manifest.json"
    (newest(run) / "manifest.json").write_bytes(source.read_bytes())
    again = Run(run.folder.path)
    manifest = again.manager.newest_trusted()
    assert (manifest.step, manifest.folder.name) == (4, "step-00000004")
    assert verify_folder(manifest.folder) == []


def test_nothing_of_a_refused_checkpoint_reaches_the_model(run):
    """The live state is the same before and after a refusal."""
    flip(newest(run) / FILES[0], 100, bit=1)
    again = Run(run.folder.path, seed=3)
    before = {name: tensor.clone() for name, tensor in again.model.state_dict().items()}
    again.manager.newest_trusted()
    after = again.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def _reason(run):
    return (run.folder.quarantine / "step-00000008.reason.json").read_text()
