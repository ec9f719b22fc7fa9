# SPDX-License-Identifier: Apache-2.0
"""Saving, finding and restoring the checkpoints of a run in one process."""

import json

import pytest
import torch
from safetensors import safe_open

from mprecipes.checkpoint.digests import state_digests
from mprecipes.checkpoint.manager import CheckpointManager
from mprecipes.checkpoint.manifest import read_manifest, verify_folder
from mprecipes.checkpoint.snapshot import live_tensors, take_snapshot
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position
from mprecipes.errors import CheckpointError, NumericsError
from tests.toys import FACTS, Folder, Run

SAVE_POINTS = [
    "save.begin",
    "save.before_file",
    "save.after_file",
    "save.before_manifest",
    "save.after_manifest",
    "save.before_publish",
]


def state_of(run):
    return take_snapshot(live_tensors(run.model, run.optimizer))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_save_publishes_a_whole_checkpoint(tmp_path):
    """Folder, files and manifest are there under the step's name, verified, and nothing else is."""
    run = Run(tmp_path)
    run.train([1])
    path = run.folder.checkpoints / "step-00000001"
    assert run.names() == ["step-00000001"]
    assert sorted(file.name for file in path.iterdir()) == [
        "SHA256SUMS",
        "manifest.json",
        "rank-00000.json",
        "tensors-rank00000-000.safetensors",
    ]
    assert verify_folder(path) == []
    manifest = read_manifest(path)
    assert (manifest.step, manifest.samples_seen, manifest.tokens_seen) == (1, 2, 10)
    assert manifest.run_id == "0123456789ab"
    assert manifest.config == FACTS["config"]
    assert manifest.params["narrow"] == "bfloat16"
    assert manifest.shapes["embed.weight"] == [8, 4]
    assert manifest.state_digests == state_digests(live_tensors(run.model, run.optimizer))
    assert json.loads((path / "rank-00000.json").read_text()) == {"rank": 0, "state": {"draws": 1}}


def test_the_report_of_a_save(tmp_path):
    """Bytes are those on disk without manifest and sums; the counts say one save."""
    run = Run(tmp_path)
    assert run.manager.last_save is None
    run.train([1])
    report = run.manager.last_save
    files = read_manifest(report.path).files
    assert report.step == 1
    assert report.bytes == report.rank_bytes == sum(entry.bytes for entry in files)
    assert 0 < report.seconds <= report.blocked_seconds
    assert run.manager.counts == {"saves": 1}
    assert report.digest_seconds > 0 and report.write_seconds > 0
    assert (report.waited_seconds < report.blocked_seconds, report.kept, report.error) == (
        True, False, None,
    )  # fmt: skip


def test_adamw_state_is_twice_the_weights_on_disk(tmp_path):
    """Weights once, moments once each: to the byte, beside one step number and the header."""
    model = torch.nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    manager = CheckpointManager(
        folder=Folder(tmp_path), ranks=Ranks(), model=model, optimizer=optimizer
    )
    manager.save(Position(1, 1, 1, 1), facts={}, rank_state={}, wait=True)
    weights = 4 * 256 * 256
    (tensors,) = tmp_path.glob("checkpoints/*/*.safetensors")
    header = 8 + int.from_bytes(tensors.read_bytes()[:8], "little")
    assert tensors.stat().st_size - header == weights + 2 * weights + 4
    assert header < 1000


def test_a_restored_run_goes_on_exactly(tmp_path):
    """Three steps, a new process's objects, two more: the same bits as five steps in a row."""
    through = Run(tmp_path / "through")
    through.train([1, 2, 3, 4, 5], save=False)
    Run(tmp_path / "cut").train([1, 2, 3])
    resumed = Run(tmp_path / "cut", seed=99)
    manifest = resumed.manager.newest_trusted()
    assert manifest.step == 3
    assert resumed.manager.restore(manifest) == {"draws": 3}
    assert state_digests(live_tensors(resumed.model, resumed.optimizer)) == manifest.state_digests
    resumed.train([4, 5])
    assert same(state_of(resumed), state_of(through))


def test_a_run_can_be_saved_before_its_first_step(tmp_path):
    """Step 0 has no optimizer state; it comes back as none."""
    run = Run(tmp_path)
    run.save(0)
    other = Run(tmp_path, seed=5)
    other.train([1], save=False)
    other.manager.restore(other.manager.newest_trusted())
    assert same(state_of(other), state_of(run))
    assert not other.optimizer.state[other.model.narrow]


def test_a_replayed_save_keeps_what_is_there(tmp_path):
    """Saving a published step again writes nothing, and gives the folder that was there."""
    run = Run(tmp_path)
    run.train([1])
    path = run.folder.checkpoints / "step-00000001"
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert run.save(1) == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    assert run.manager.counts == {"saves": 1, "kept_saves": 1}


def test_a_replayed_save_replaces_what_does_not_verify(tmp_path):
    """The damaged one is kept in quarantine; the new one verifies."""
    run = Run(tmp_path)
    run.train([1])
    (run.folder.checkpoints / "step-00000001" / "rank-00000.json").unlink()
    path = run.save(1)
    assert verify_folder(path) == []
    assert (run.folder.quarantine / "step-00000001").is_dir()
    assert run.manager.counts["quarantined"] == 1


def test_candidates_are_numbers_newest_first(tmp_path):
    """Order is by step; the text of a name would say 9 > 1000."""
    run = Run(tmp_path, keep_last=9)
    run.train([9, 1000, 100])
    assert run.manager.candidates() == [1000, 100, 9]


@pytest.mark.parametrize("action", ["eio", "enospc"])
@pytest.mark.parametrize("point", SAVE_POINTS)
def test_a_failed_save_loses_nothing(tmp_path, monkeypatch, action, point):
    """A disk error at any point is a CheckpointError; the old ones stay and the next save works."""
    run = Run(tmp_path)
    run.train([1, 2])
    monkeypatch.setenv("MPRECIPES_FAULT", f"{action}@{point}:3")
    run.train([3], save=False)
    with pytest.raises(CheckpointError) as caught:
        run.save(3)
    assert caught.value.found.endswith(f"planted fault at {point}")
    assert "older ones are untouched" in caught.value.expected
    assert caught.value.where == "saving step 3"
    assert "free space" in caught.value.action
    assert run.names() == ["step-00000001", "step-00000002"]
    assert run.manager.counts == {"saves": 2, "failed_saves": 1}
    monkeypatch.delenv("MPRECIPES_FAULT")
    assert verify_folder(run.save(3)) == []
    assert run.manager.newest_trusted().step == 3


def test_a_failure_after_publication_is_told_and_the_checkpoint_is_whole(tmp_path, monkeypatch):
    """An error between rename and return does not make a published checkpoint less than whole."""
    run = Run(tmp_path)
    monkeypatch.setenv("MPRECIPES_FAULT", "eio@save.after_publish")
    with pytest.raises(CheckpointError):
        run.save(1)
    monkeypatch.delenv("MPRECIPES_FAULT")
    assert run.save(1) == run.folder.checkpoints / "step-00000001"
    assert run.manager.counts["kept_saves"] == 1


def test_facts_that_are_no_json_are_a_failed_save(tmp_path):
    """A fact that the manifest cannot hold publishes nothing and names the reason."""
    run = Run(tmp_path)
    with pytest.raises(CheckpointError, match="not JSON compliant"):
        facts = {"config": {"x": float("nan")}}
        run.manager.save(Position(1), facts=facts, rank_state={}, wait=True)
    assert run.names() == []


@pytest.mark.parametrize("where", ["weights/narrow", "optimizer/embed.weight/exp_avg_sq"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_state_that_is_not_finite_is_never_published(tmp_path, where, bad):
    """The tensors are named, and a good checkpoint is not rotated away by a bad one."""
    run = Run(tmp_path, keep_last=1)
    run.train([1])
    run.train([2], save=False)
    live_tensors(run.model, run.optimizer)[where].view(-1)[-1] = bad
    with pytest.raises(NumericsError) as caught:
        run.save(2)
    assert caught.value.found == f"1 tensors hold NaN or infinity: {where}"
    assert "nothing was published" in caught.value.expected
    assert caught.value.where == "saving step 2"
    assert "last good checkpoint" in caught.value.action
    assert run.names() == ["step-00000001"]


def test_retention_runs_after_publication(tmp_path):
    """With keep_last 2 the two newest are there after each save."""
    run = Run(tmp_path, keep_last=2)
    for step, expected in [(1, [1]), (2, [2, 1]), (3, [3, 2]), (4, [4, 3])]:
        run.train([step])
        assert run.manager.candidates() == expected


def test_protected_and_frozen_checkpoints_stay(tmp_path):
    """The resumed-from step outlives its age; while retention is frozen nothing goes at all."""
    run = Run(tmp_path, keep_last=1)
    run.train([1])
    run.manager.protected.add(1)
    run.train([2, 3])
    assert run.manager.candidates() == [3, 1]
    run.manager.freeze_retention()
    run.train([4, 5])
    assert run.manager.candidates() == [5, 4, 3, 1]
    run.manager.protected.clear()
    run.manager.release_retention()
    run.manager.wait()
    assert run.manager.candidates() == [5]


def test_a_named_checkpoint_is_kept_for_good(tmp_path):
    """It is copied to the milestones, and the rolling one goes its way; its manifest says so."""
    run = Run(tmp_path, keep_last=1)
    run.train([1], save=False)
    run.save(1, milestone="warm")
    run.train([2, 3])
    assert run.manager.candidates() == [3]
    path = run.folder.milestones / "warm"
    assert verify_folder(path) == []
    assert (read_manifest(path).step, read_manifest(path).milestone) == (1, "warm")


def test_sweep_at_start(tmp_path):
    """What a dead process left half made is gone, the rest is not."""
    run = Run(tmp_path)
    run.train([1])
    (run.folder.checkpoints / ".staging-step-00000002-x").mkdir()
    run.manager.sweep()
    assert run.names() == ["step-00000001"]


def test_files_hold_the_tensors_under_their_names(tmp_path):
    """Any safetensors reader finds weights and moments by name."""
    run = Run(tmp_path)
    run.train([1])
    path = run.folder.checkpoints / "step-00000001" / "tensors-rank00000-000.safetensors"
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(live_tensors(run.model, run.optimizer))
        assert torch.equal(file.get_tensor("weights/narrow"), run.model.narrow.detach())
