# SPDX-License-Identifier: Apache-2.0
"""What follows a publication: milestones first, then retention, then the mirror; never an error."""

import hashlib
import json
import shutil
import threading

import pytest

from mprecipes.checkpoint.abandoned import abandon
from mprecipes.checkpoint.aftercare import Aftercare, pin_path, pinned_steps
from mprecipes.checkpoint.manifest import read_manifest
from mprecipes.checkpoint.milestones import make_milestone
from mprecipes.checkpoint.mirror import Mirror
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.errors import ConfigError
from mprecipes.identity.files import canonical_json
from tests.kept import TENSORS, Folder, contents, flip, kept

PATIENCE = 60


@pytest.fixture
def run(tmp_path):
    return Folder(tmp_path / "mine")


def care(run, **policy):
    return Aftercare(run, CheckpointPolicy(**policy), run.run_id, pauses=(0.0,))


def publish(run, aftercare, *steps, milestone=None, **losses):
    """Saves and hands over each step; `loss=` is measured at all of them."""
    metrics = {f"eval/{name}": value for name, value in losses.items()}
    for step in steps:
        aftercare.published(run.save(step), milestone, metrics)


def names(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_the_newest_stay(run):
    """Each publication deletes what is too old, and nothing of it is left."""
    aftercare = care(run, keep_last=2)
    publish(run, aftercare, 1, 2, 3, 4)
    assert names(run.checkpoints) == ["step-00000003", "step-00000004"]
    assert aftercare.counts["deleted"] == 2


def test_a_named_save_is_a_milestone_and_a_rolling_checkpoint(run):
    """The milestone is a copy that stays; the checkpoint itself rolls on and uses up its place."""
    aftercare = care(run, keep_last=2)
    publish(run, aftercare, 1)
    publish(run, aftercare, 2, milestone="warm")
    before = contents(run.checkpoints / "step-00000002")
    publish(run, aftercare, 3, 4)
    assert run.steps() == [3, 4]
    assert run.steps("milestones") == [2]
    assert contents(run.milestones / "warm") == before
    assert aftercare.counts["milestones"] == 1


def test_milestone_steps(run):
    """Steps of the policy become milestones under their step's name."""
    aftercare = care(run, keep_last=1, milestone_steps=(2, 4, 99))
    publish(run, aftercare, 1, 2, 3, 4, 5)
    assert run.steps() == [5]
    assert names(run.milestones) == [
        "step-00000002", "step-00000002.json", "step-00000004", "step-00000004.json",
    ]  # fmt: skip


def test_a_name_in_the_manifest_is_made_up_for(run):
    """A process killed between publication and copy: the next one makes the milestone."""
    run.save(7, milestone="end")
    aftercare = care(run, keep_last=1)
    aftercare.close()
    assert run.steps("milestones") == [7]
    assert names(run.milestones) == ["end", "end.json"]


def test_a_milestone_that_cannot_be_copied_keeps_its_checkpoint(run, monkeypatch, caplog):
    """A full disk: counted, warned, the checkpoint stays, and a later pass makes the copy."""
    aftercare = care(run, keep_last=1)
    monkeypatch.setenv("MPRECIPES_FAULT", "enospc@milestone.before_publish:2")
    publish(run, aftercare, 2, milestone="warm")
    publish(run, aftercare, 3, 4)
    assert run.steps() == [2, 4]
    assert aftercare.counts["milestone_errors"] == 3
    assert "milestone warm of step 2" in caplog.text
    assert [each.reason for each in aftercare.plan()] == [
        "milestone warm is not copied yet", "one of the newest 1",
    ]  # fmt: skip
    monkeypatch.delenv("MPRECIPES_FAULT")
    publish(run, aftercare, 5)
    assert run.steps() == [5]
    assert run.steps("milestones") == [2]


def test_a_taken_name_is_completed_by_the_step(run):
    """The end of a longer run is kept beside the earlier end, not in its place and not lost."""
    make_milestone(run.save(5), run.milestones, "end")
    aftercare = care(run, keep_last=1)
    publish(run, aftercare, 9, milestone="end")
    publish(run, aftercare, 10)
    assert run.steps() == [10]
    assert read_manifest(run.milestones / "end").step == 5
    assert read_manifest(run.milestones / "end-step-00000009").step == 9


def test_a_damaged_checkpoint_becomes_no_milestone_and_does_not_count(run, caplog):
    """It is not tried again and again, and good ones are not deleted for it."""
    aftercare = care(run, keep_last=1)
    publish(run, aftercare, 1)
    manifest = run.save(2)
    flip(manifest.folder / TENSORS)
    aftercare.published(manifest, "warm")
    assert names(run.checkpoints) == ["step-00000001", "step-00000002"]
    publish(run, aftercare, 3)
    assert names(run.checkpoints) == ["step-00000002", "step-00000003"]
    assert aftercare.counts["milestone_errors"] == 1
    assert "weights/layer.weight" in caplog.text
    assert aftercare.damaged == {2}


def test_a_bad_name_is_refused_and_the_run_goes_on(run, caplog):
    """A name that is not allowed is an error of that milestone alone."""
    aftercare = care(run, keep_last=1)
    publish(run, aftercare, 1, milestone="../escape")
    publish(run, aftercare, 2)
    assert run.steps() == [2]
    assert aftercare.counts["milestone_errors"] == 1
    assert "name of a milestone" in caplog.text
    assert not (run.path / "escape").exists()


def test_the_best_stays_over_restarts(run):
    """Values measured at each step are kept on the disk, those of deleted steps are not."""
    first = care(run, keep_last=1, keep_best="eval/loss")
    publish(run, first, 1, loss=3.0)
    publish(run, first, 2, loss=2.0)
    publish(run, first, 3, loss=2.5)
    publish(run, first, 4)
    assert run.steps() == [2, 4]
    second = care(run, keep_last=1, keep_best="eval/loss")
    publish(run, second, 5, loss=2.4)
    assert run.steps() == [2, 5]
    publish(run, second, 6, loss=1.0)
    publish(run, second, 7, loss=float("nan"))
    assert run.steps() == [6, 7]
    values = json.loads((run.checkpoints / "evaluations.json").read_text())
    assert values["6"] == {"eval/loss": 1.0}
    assert "3" not in values
    assert [each.reason for each in second.plan()] == ["best eval/loss", "one of the newest 1"]


def test_pinned_protected_and_every_nth_stay(run):
    """Each rule keeps its steps; taking the pin away gives that one up."""
    aftercare = care(run, keep_last=1, keep_every=4)
    run.save(1)
    pin_path(run.checkpoints, 1).touch()
    (run.checkpoints / "step-notes.pinned").touch()
    aftercare.protected.add(2)
    publish(run, aftercare, 2, 3, 4, 5, 6)
    assert run.steps() == [1, 2, 4, 6]
    assert pinned_steps(run.checkpoints) == {1}
    assert [each.reason for each in aftercare.plan()] == [
        "pinned", "this run resumed from it", "every 4 steps", "one of the newest 1",
    ]  # fmt: skip
    pin_path(run.checkpoints, 1).unlink()
    aftercare.protected.clear()
    aftercare.retain()
    assert run.steps() == [4, 6]


def test_frozen_until_released(run):
    """While a resume is on probation nothing is deleted; its release makes up for it."""
    aftercare = care(run, keep_last=1)
    aftercare.freeze()
    publish(run, aftercare, 1, 2, 3)
    assert run.steps() == [1, 2, 3]
    assert kept(aftercare.plan()) == [3]
    aftercare.release()
    assert run.steps() == [3]


def test_what_is_not_ours_is_not_touched(run):
    """A copy under another name, quarantine, milestones and a stranger's files stay."""
    run.save(1)
    shutil.copytree(run.checkpoints / "step-00000001", run.checkpoints / "mine")
    make_milestone(run.save(2), run.milestones, "warm")
    (run.quarantine / "step-00000000").mkdir(parents=True)
    (run.checkpoints / "notes.txt").write_text("x")
    aftercare = care(run, keep_last=1)
    publish(run, aftercare, 3)
    assert names(run.checkpoints) == ["mine", "notes.txt", "step-00000003"]
    assert names(run.quarantine) == ["step-00000000"]
    assert run.steps("milestones") == [2]


@pytest.mark.parametrize("point", ["retention.before_delete", "retention.after_rename"])
def test_a_deletion_that_fails_ends_nothing(run, monkeypatch, caplog, point):
    """It is counted and logged, and the next publication deletes."""
    aftercare = care(run, keep_last=1)
    publish(run, aftercare, 1)
    monkeypatch.setenv("MPRECIPES_FAULT", f"eio@{point}:1")
    publish(run, aftercare, 2)
    assert aftercare.counts["cleanup_errors"] == 1
    assert "step-00000001 could not be removed" in caplog.text
    monkeypatch.delenv("MPRECIPES_FAULT")
    publish(run, aftercare, 3)
    assert run.steps() == [3]


def test_an_unforeseen_error_ends_nothing(run, caplog):
    """Whatever goes wrong in keeping checkpoints, `published` returns."""
    aftercare = care(run, keep_last=1)
    manifest = run.save(1)
    (run.checkpoints / "evaluations.json").mkdir()
    aftercare.published(manifest, None, {"eval/loss": 1.0})
    assert aftercare.counts["aftercare_errors"] >= 1
    assert "evaluations.json of step 1 is not written" in caplog.text


def test_sweep_removes_half_made_copies_only(run):
    """Staging of a milestone goes, milestones stay."""
    make_milestone(run.save(2), run.milestones, "warm")
    (run.milestones / ".staging-end").mkdir()
    care(run).sweep()
    assert names(run.milestones) == ["warm", "warm.json"]


@pytest.fixture
def mirrored(run, tmp_path):
    url = f"file://{tmp_path}/mirror"
    return Mirror(url, run.path), url


def there(mirror):
    found = mirror.published()
    assert all(mirror.verify(each, lambda _: None) == [] for each in found)
    return sorted(each.place for each in found)


def test_the_mirror_has_what_is_kept(run, mirrored):
    """Rolling checkpoints under the same plan, and every milestone for good."""
    mirror, url = mirrored
    for step in range(1, 5):  # each in a launch of its own, so that the mirror saw every one
        aftercare = care(run, keep_last=2, mirror=url)
        publish(run, aftercare, step, milestone="warm" if step == 1 else None)
        aftercare.close(seconds=PATIENCE)
    assert there(mirror) == [
        "checkpoints/step-00000003", "checkpoints/step-00000004", "milestones/warm",
    ]  # fmt: skip
    assert aftercare.idle()
    assert aftercare.counts["mirror_deleted"] >= 1
    assert aftercare.counts["mirror_errors"] == 0


def test_the_mirror_keeps_all_while_frozen(run, mirrored):
    """Nothing is deleted there before the verdict on a resume either."""
    mirror, url = mirrored
    aftercare = care(run, keep_last=1, mirror=url)
    aftercare.freeze()
    publish(run, aftercare, 1, 2)
    aftercare.close(seconds=PATIENCE)
    assert there(mirror) == ["checkpoints/step-00000001", "checkpoints/step-00000002"]


def provisional(run, step):
    """Gives the manifest of a checkpoint that was saved on probation."""
    manifest = run.save(step)
    manifest.raw["provisional"] = {"attempt": 1, "base": 1}
    path = manifest.folder / "manifest.json"
    values = {key: value for key, value in manifest.raw.items() if key != "root_sha256"}
    root = hashlib.sha256(canonical_json(values)).hexdigest()
    text = json.dumps({**values, "root_sha256": root}, indent=1).encode("ascii") + b"\n"
    path.write_bytes(text)
    return read_manifest(manifest.folder)


def test_what_is_provisional_waits_for_the_verdict(run, mirrored):
    """No milestone and no copy at the mirror while frozen; both follow the release."""
    mirror, url = mirrored
    aftercare = care(run, mirror=url)
    aftercare.freeze()
    aftercare.published(provisional(run, 2), "warm")
    assert names(run.milestones) == []
    aftercare.release()
    aftercare.close(seconds=PATIENCE)
    assert [name for name in names(run.milestones) if name == "warm"] == ["warm"]
    assert there(mirror) == ["checkpoints/step-00000002", "milestones/warm"]


def test_the_mirror_never_gives_up_what_is_kept_here(run, mirrored):
    """A newer checkpoint there, which this disk has lost, does not push out what is here."""
    mirror, url = mirrored
    first = care(run, keep_last=2, mirror=url)
    publish(run, first, 20, 30)
    first.close(seconds=PATIENCE)
    shutil.rmtree(run.checkpoints)
    second = care(run, keep_last=2, mirror=url)
    publish(run, second, 12)
    second.close(seconds=PATIENCE)
    assert [place[-2:] for place in there(mirror)] == ["12", "20", "30"]


def given_up(run, step):
    """Sets the checkpoint of a step aside, as a rollback does."""
    manifest = read_manifest(run.checkpoints / f"step-{step:08d}")
    abandon(run.path, [manifest], from_step=step)
    shutil.move(manifest.folder, run.path / "elsewhere")
    return manifest


def test_what_was_given_up_is_not_the_newest_at_the_mirror(run, mirrored):
    """It uses up no place there and goes once the branch that went on is there; pins hold."""
    mirror, url = mirrored
    aftercare = care(run, keep_last=2, mirror=url)
    publish(run, aftercare, 20, 30)
    aftercare.close(seconds=PATIENCE)
    gone = given_up(run, 30)
    (run.checkpoints / "step-00000030.pinned").touch()
    aftercare = care(run, keep_last=2, mirror=url)
    publish(run, aftercare, 25)
    aftercare.close(seconds=PATIENCE)
    assert [place[-2:] for place in there(mirror)] == ["20", "25", "30"]
    (run.checkpoints / "step-00000030.pinned").unlink()
    aftercare = care(run, keep_last=2, mirror=url)
    aftercare.freeze()
    publish(run, aftercare, 27)
    aftercare.close(seconds=PATIENCE)
    assert [place[-2:] for place in there(mirror)] == ["20", "25", "27", "30"]
    aftercare = care(run, keep_last=2, mirror=url)
    publish(run, aftercare, 28)
    aftercare.close(seconds=PATIENCE)
    assert [place[-2:] for place in there(mirror)] == ["27", "28"]
    assert mirror.abandoned()[0] == {gone.root_sha256}


def test_what_is_made_again_bit_for_bit_is_good(run, mirrored):
    """It has the root digest of what was given up, and stays good after it is deleted here."""
    mirror, url = mirrored
    aftercare = care(run, mirror=url)
    publish(run, aftercare, 20, 30)
    aftercare.close(seconds=PATIENCE)
    gone = given_up(run, 30)
    aftercare = care(run, mirror=url)
    publish(run, aftercare, 25)
    aftercare.close(seconds=PATIENCE)
    assert mirror.abandoned()[0] == {gone.root_sha256}
    aftercare = care(run, mirror=url)
    publish(run, aftercare, 30)
    aftercare.close(seconds=PATIENCE)
    aftercare = care(run, keep_last=1, mirror=url)
    publish(run, aftercare, 31)
    assert run.steps() == [31]
    aftercare.close(seconds=PATIENCE)
    assert mirror.abandoned()[0] == frozenset()


def test_a_mirror_that_cannot_be_told_is_told_later(run, mirrored, monkeypatch):
    """Nothing is copied before it has taken note; training's disk is complete meanwhile."""
    mirror, url = mirrored
    aftercare = care(run, mirror=url)
    publish(run, aftercare, 20, 30)
    aftercare.close(seconds=PATIENCE)
    gone = given_up(run, 30)

    def unreachable(self, roots, cuts):
        raise TimeoutError("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(Mirror, "abandon", unreachable)
        aftercare = care(run, mirror=url)
        publish(run, aftercare, 25)
        aftercare.close(seconds=PATIENCE)
    assert aftercare.counts["mirror_errors"] >= 1
    assert run.steps() == [20, 25]
    assert [place[-2:] for place in there(mirror)] == ["20", "30"]
    assert mirror.abandoned() == (frozenset(), frozenset())
    again = care(run, mirror=url)
    publish(run, again, 27)
    again.close(seconds=PATIENCE)
    assert [place[-2:] for place in there(mirror)] == ["20", "25", "27"]
    assert mirror.abandoned()[0] == {gone.root_sha256}
    assert again.counts["mirror_errors"] == 0


def test_a_damaged_checkpoint_is_not_mirrored(run, mirrored):
    """Known damage is not spread."""
    mirror, url = mirrored
    aftercare = care(run, mirror=url)
    manifest = run.save(2)
    flip(manifest.folder / TENSORS)
    aftercare.published(manifest, "warm")
    publish(run, aftercare, 3)
    aftercare.close(seconds=PATIENCE)
    assert there(mirror) == ["checkpoints/step-00000003"]


def test_a_mirrored_milestone_is_never_replaced(run, mirrored, caplog):
    """Of two different milestones of one name the one that is there stays; it is said once."""
    mirror, url = mirrored
    aftercare = care(run, mirror=url)
    publish(run, aftercare, 2, milestone="warm")
    aftercare.close(seconds=PATIENCE)
    shutil.rmtree(run.milestones)
    shutil.rmtree(run.checkpoints)
    again = care(run, mirror=url)
    publish(run, again, 3, milestone="warm")
    again.close(seconds=PATIENCE)
    (milestone,) = mirror.published(["milestones"])
    assert milestone.manifest is not None and milestone.manifest.step == 2
    assert caplog.text.count("the mirror has another milestone warm") == 1


def test_what_is_being_copied_is_not_deleted(run, mirrored):
    """A slow mirror holds its checkpoint until the copy is done."""
    mirror, url = mirrored
    aftercare = care(run, keep_last=1, mirror=url)
    reached, go = threading.Event(), threading.Event()
    own = aftercare._mirroring._mirror
    push = own.push

    def slowly(*arguments):
        reached.set()
        go.wait(PATIENCE)
        return push(*arguments)

    own.push = slowly
    publish(run, aftercare, 1)
    assert reached.wait(PATIENCE)
    assert not aftercare.idle()
    publish(run, aftercare, 2, 3)
    assert run.steps() == [1, 3]
    assert aftercare.plan()[0].reason == "being copied to the mirror"
    go.set()
    aftercare.close(seconds=PATIENCE)
    assert "checkpoints/step-00000003" in there(mirror)
    assert aftercare.counts["mirror_errors"] == 0


def test_a_mirror_that_fails_fails_nothing(run, tmp_path, caplog):
    """Training's disk is complete, the errors are counted and told."""
    (tmp_path / "broken").write_text("not a folder")
    aftercare = care(run, keep_last=1, mirror=f"file://{tmp_path}/broken")
    publish(run, aftercare, 1, 2)
    aftercare.close(seconds=PATIENCE)
    assert run.steps() == [2]
    assert aftercare.counts["mirror_errors"] >= 2
    assert "NotADirectoryError" in caplog.text


def test_a_mirror_that_cannot_be_used_is_refused_at_start(run):
    """A protocol nobody knows is found before the first step."""
    with pytest.raises(ConfigError):
        care(run, mirror="nosuch://x")


def test_a_scrubber_runs_beside(run):
    """With `verify_every_hours` damage of a kept checkpoint is found and retention told."""
    (run.path / "reports").mkdir(parents=True)
    (run.path / "reports" / "scrub.json").write_text('{"time": 0.0}')
    flip(run.save(1).folder / TENSORS)
    aftercare = care(run, keep_last=2, verify_every_hours=1.0)
    told = threading.Event()

    def tell(step):
        aftercare.damaged.add(step)
        told.set()

    aftercare._scrubber._damaged = tell
    publish(run, aftercare, 2)
    assert told.wait(PATIENCE)
    aftercare.close()
    assert aftercare.counts["scrub_problems"] == 1
    aftercare.retain()
    assert names(run.checkpoints) == ["step-00000001", "step-00000002"]
    assert "next start moves it to quarantine" in aftercare.plan()[0].reason


def test_the_newest_from_before_an_open_spike_stays(run):
    """A spike that began at step 3 keeps step 2 beyond its age until it is over."""
    aftercare = care(run, keep_last=1)
    publish(run, aftercare, 1, 2)
    aftercare.keep_before = 3
    publish(run, aftercare, 3, 4, 5)
    assert names(run.checkpoints) == ["step-00000002", "step-00000005"]
    assert aftercare.plan()[0].reason == "from before an open loss spike"
    aftercare.keep_before = None
    publish(run, aftercare, 6)
    assert names(run.checkpoints) == ["step-00000006"]


def test_a_spike_that_everything_is_younger_than_keeps_nothing(run):
    """Without a checkpoint from before it the plan is as ever."""
    aftercare = care(run, keep_last=1)
    aftercare.keep_before = 1
    publish(run, aftercare, 1, 2)
    assert names(run.checkpoints) == ["step-00000002"]


def test_a_milestone_that_rotted_does_not_make_its_next_one_damaged(run):
    """The new milestone has its step in the name; the step it was made of is as good as before."""
    aftercare = care(run, keep_last=1)
    publish(run, aftercare, 10, milestone="pretrain-end")
    data = bytearray((run.milestones / "pretrain-end" / "manifest.json").read_bytes())
    data[5] ^= 1
    (run.milestones / "pretrain-end" / "manifest.json").write_bytes(data)
    publish(run, aftercare, 20, milestone="pretrain-end")
    assert aftercare.damaged == set()
    assert read_manifest(run.milestones / "pretrain-end-step-00000020").step == 20
    assert (run.milestones / "pretrain-end" / "manifest.json").read_bytes() == bytes(data)
    assert aftercare.counts["milestone_errors"] == 0
    publish(run, aftercare, 30)
    assert run.steps() == [30]
