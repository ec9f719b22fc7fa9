# SPDX-License-Identifier: Apache-2.0
"""A checkpoint back into the live state, and what happens to damaged ones."""

import pytest
import torch

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


def test_the_mirrors_newest_may_be_too_new(tmp_path):
    """Step 1 is damaged here and the mirror's newest is step 2: it is not gone back to."""
    policy = CheckpointPolicy(mirror=f"file://{tmp_path}/mirror")
    (tmp_path / "mine").mkdir()
    run = Run(tmp_path / "mine", policy=policy)
    run.train([1, 2])
    run.manager.close()
    path = run.folder.checkpoints / "step-00000001" / "tensors-rank00000-000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    other = Run(tmp_path / "mine", policy=policy)
    with pytest.raises(NoTrustedCheckpoint) as caught:
        other.manager.restore_before(2, "led astray")
    error = caught.value
    assert error.found == (
        "no checkpoint here from before step 2 verifies, and the mirror's newest is of step 2, "
        "which led astray"
    )
    assert error.expected == "a checkpoint from before step 2"
    assert error.where == "checkpoints/"
    assert error.action.startswith("copy an older one from the mirror")
