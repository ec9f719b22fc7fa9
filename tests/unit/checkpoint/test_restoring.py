# SPDX-License-Identifier: Apache-2.0
"""A checkpoint back into the live state, and what happens to damaged ones."""

import shutil

import pytest
import torch

from mprecipes.checkpoint.aside import choose
from mprecipes.checkpoint.manager import CheckpointManager
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.checkpoint.snapshot import live_tensors, take_snapshot
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position
from mprecipes.errors import NoTrustedCheckpoint, VerificationError
from tests.toys import Folder, Run, toy


def state_of(run):
    return take_snapshot(live_tensors(run.model, run.optimizer))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_another_model_is_refused_by_name(tmp_path):
    """A checkpoint that does not fit the live model changes nothing."""
    Run(tmp_path).save(0)
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    manager = CheckpointManager(
        folder=Folder(tmp_path),
        ranks=Ranks(),
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
    )
    with pytest.raises(VerificationError, match="weights/bias: missing"):
        manager.restore(manager.newest_trusted())
    assert torch.equal(model.weight, before)


def test_damage_between_finding_and_restoring_is_caught(tmp_path):
    """Files are verified as they are read; nothing of a bad one may be used: all becomes NaN."""
    run = Run(tmp_path)
    run.train([1])
    manifest = run.manager.newest_trusted()
    path = manifest.folder / "tensors-rank00000-000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    with pytest.raises(VerificationError, match="tensors-rank00000-000"):
        run.manager.restore(manifest)
    for name, tensor in live_tensors(run.model, run.optimizer).items():
        assert not tensor.is_floating_point() or tensor.isnan().all(), name


def test_the_one_before_takes_the_place_of_a_damaged_one(tmp_path):
    """The newest turns out bad while it is read: quarantined, and the older one is restored."""
    run = Run(tmp_path)
    run.train([1])
    expected = state_of(run)
    run.train([2])
    path = run.folder.checkpoints / "step-00000002" / "tensors-rank00000-000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    asked = []
    other = Run(tmp_path, seed=3)
    other.train([1, 2, 3], save=False)
    manifest, state = other.manager.restore_newest(asked.append)
    assert [each.step for each in asked] == [2, 1]
    assert (manifest.step, state) == (1, {"draws": 1})
    assert same(state_of(other), expected)
    (refusal,) = other.manager.refusals
    assert (refusal.name, refusal.quarantined_as) == ("step-00000002", "step-00000002")
    assert "weights/embed.weight" in refusal.problems[0].tensors


def test_a_candidate_refused_by_its_manifest_changes_nothing(tmp_path):
    """The caller's check comes before live state is touched; what it raises ends the search."""
    run = Run(tmp_path)
    run.train([1])
    other = Run(tmp_path, seed=3)
    before = state_of(other)

    def refuse(manifest):
        raise KeyError(manifest.step)

    with pytest.raises(KeyError, match="1"):
        other.manager.restore_newest(refuse)
    assert same(state_of(other), before)
    assert run.names() == ["step-00000001"]


def test_without_any_checkpoint_the_check_is_asked_once(tmp_path):
    """A first start has no manifest, and nothing is restored."""
    asked = []
    assert Run(tmp_path).manager.restore_newest(asked.append) == (None, {})
    assert asked == [None]


def test_a_damaged_header_is_damage_and_not_another_model(tmp_path):
    """A name changed by one bit fits no model; the file's digest says why."""
    run = Run(tmp_path)
    run.train([1, 2])
    path = run.folder.checkpoints / "step-00000002" / "tensors-rank00000-000.safetensors"
    data = path.read_bytes().replace(b"weights/idle", b"weights/idlf")
    path.write_bytes(data)
    manifest, _ = run.manager.restore_newest(lambda manifest: None)
    assert manifest.step == 1
    assert run.manager.refusals[0].name == "step-00000002"


def scaled(path, scaler):
    model, optimizer = toy()
    return CheckpointManager(
        folder=Folder(path), ranks=Ranks(), model=model, optimizer=optimizer, scaler=scaler
    )


def test_the_loss_scale_comes_back_with_the_live_settings(tmp_path):
    """Scale and growth counter are state; growth factor and interval are the new launch's."""
    old = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=10)
    old.load_state_dict(old.state_dict() | {"_growth_tracker": 7})
    manager = scaled(tmp_path, old)
    manager.save(Position(1), facts={}, rank_state={}, wait=True)
    new = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=99)
    other = scaled(tmp_path, new)
    other.restore(other.newest_trusted())
    assert new.get_scale() == 512.0
    assert new.state_dict()["_growth_tracker"] == 7
    assert new.get_growth_interval() == 99


@pytest.mark.parametrize("saved", [True, False])
def test_a_scaler_on_one_side_only_is_said(tmp_path, caplog, saved):
    """Saved with and restored without a loss scaler, or the other way, is logged."""
    scaler = torch.amp.GradScaler("cpu")
    manager = scaled(tmp_path, scaler if saved else None)
    manager.save(Position(1), facts={}, rank_state={}, wait=True)
    manager = scaled(tmp_path, None if saved else scaler)
    manager.restore(manager.newest_trusted())
    told = ("one", "none") if saved else ("none", "one")
    assert f"loss scaler: {told[0]} when step 1 was saved, {told[1]} now" in caplog.text


def test_a_state_from_before_a_step(tmp_path):
    """Step 2 and later are set aside with the reason; step 1 is live again."""
    run = Run(tmp_path)
    run.train([1])
    expected = state_of(run)
    run.train([2, 3])
    manifest, state = run.manager.restore_before(2, "led astray")
    assert (manifest.step, state, run.manager.restored.step) == (1, {"draws": 1}, 1)
    assert same(state_of(run), expected)
    assert run.manager.candidates() == [1]
    reasons = sorted(path.name for path in run.folder.quarantine.glob("*.json"))
    assert reasons == ["step-00000002.reason.json", "step-00000003.reason.json"]
    assert "led astray" in (run.folder.quarantine / reasons[0]).read_text("utf-8")
    run.train([2])
    assert run.manager.candidates() == [2, 1]


def test_nothing_from_before_a_step(tmp_path):
    """Without an older one there is nothing to go back to."""
    run = Run(tmp_path)
    run.train([1])
    with pytest.raises(NoTrustedCheckpoint, match="step-00000001: refused earlier"):
        run.manager.restore_before(1, "led astray")


def damage(run, step):
    path = run.folder.checkpoints / f"step-{step:08d}" / "tensors-rank00000-000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.fixture
def policy(tmp_path):
    return CheckpointPolicy(mirror=f"file://{tmp_path}/mirror")


def at_the_mirror(tmp_path):
    return sorted(path.name[-1] for path in (tmp_path / "mirror/mine/checkpoints").iterdir())


def launched(tmp_path, policy):
    """The run as a new process finds it, also on an empty disk."""
    (tmp_path / "mine").mkdir(exist_ok=True)
    return Run(tmp_path / "mine", policy=policy)


def test_the_mirror_has_one_from_before_a_step(tmp_path, policy):
    """Step 1 is damaged here: the mirror's is fetched, and its step 2 never published here."""
    run = launched(tmp_path, policy)
    run.train([1])
    expected = state_of(run)
    run.train([2])
    run.manager.close()
    damage(run, 1)
    other = launched(tmp_path, policy)
    manifest, state = other.manager.restore_before(2, "led astray")
    assert (manifest.step, state) == (1, {"draws": 1})
    assert same(state_of(other), expected)
    assert other.names() == ["step-00000001"]


def test_the_mirrors_newest_may_be_too_new(tmp_path, policy):
    """Step 1 is damaged here and the mirror has step 2 only: it is not gone back to, and not found
    by the same command later."""
    run = launched(tmp_path, policy)
    run.train([1, 2])
    run.manager.close()
    damage(run, 1)
    shutil.rmtree(tmp_path / "mirror/mine/checkpoints/step-00000001")
    other = launched(tmp_path, policy)
    with pytest.raises(NoTrustedCheckpoint) as caught:
        other.manager.restore_before(2, "led astray")
    error = caught.value
    assert error.found == (
        "no checkpoint of the mirror from before step 2 verifies:\n    "
        "checkpoints/step-00000002: manifest.json: step 2, expected a step before 2"
    )
    assert error.expected.startswith("at least one from before step 2")
    assert error.where == f"{policy.mirror}/mine"
    assert error.action.startswith("put an intact copy")
    assert other.names() == []
    with pytest.raises(NoTrustedCheckpoint, match="of a branch that was given up"):
        launched(tmp_path, policy).manager.restore_newest(lambda manifest: None)
    assert other.names() == []


def lost(tmp_path, policy):
    """What a new machine restores: its step and the rank's state."""
    shutil.rmtree(tmp_path / "mine")
    run = launched(tmp_path, policy)
    manifest, state = run.manager.restore_newest(lambda manifest: None)
    run.manager.close()
    return manifest.step, state


def test_after_a_rollback_a_new_machine_finds_the_branch_that_went_on(tmp_path, policy):
    """Steps 3 and 4 were rolled back, 3 was made again: it is what an empty disk goes on from."""
    run = launched(tmp_path, policy)
    run.train([1, 2, 3, 4])
    run.manager.close()
    assert at_the_mirror(tmp_path)[-2:] == ["3", "4"]
    run = launched(tmp_path, policy)
    manifest, _ = run.manager.restore_before(3, "led astray")
    assert manifest.step == 2
    run.manager.save(run.position(3), facts={}, rank_state={"draws": 99}, wait=True)
    run.manager.close()
    assert at_the_mirror(tmp_path)[-2:] == ["2", "3"]
    assert lost(tmp_path, policy) == (3, {"draws": 99})


def test_after_a_chosen_step_a_new_machine_finds_the_branch_that_went_on(tmp_path, policy):
    """Of steps 1, 3 and 4 the run went on from 1 to 2: an empty disk does not go on from 4."""
    run = launched(tmp_path, policy)
    run.train([1, 3, 4])
    run.manager.close()
    choose(run.folder.path, run.folder.checkpoints, 1, attempt=1)
    run = launched(tmp_path, policy)
    run.train([2])
    run.manager.close()
    assert at_the_mirror(tmp_path) == ["1", "2"]
    assert lost(tmp_path, policy) == (2, {"draws": 2})


def test_a_step_that_was_given_up_can_be_chosen_again(tmp_path, policy):
    """Brought back from `set_aside/`, it is good at the mirror as well."""
    run = launched(tmp_path, policy)
    run.train([1, 3])
    run.manager.close()
    choose(run.folder.path, run.folder.checkpoints, 1, attempt=1)
    run = launched(tmp_path, policy)
    run.train([2])
    run.manager.close()
    choose(run.folder.path, run.folder.checkpoints, 3, attempt=2)
    run = launched(tmp_path, policy)
    run.train([4])
    run.manager.close()
    shutil.rmtree(tmp_path / "mirror/mine/checkpoints/step-00000004")
    assert lost(tmp_path, policy) == (3, {"draws": 3})
