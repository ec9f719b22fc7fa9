# SPDX-License-Identifier: Apache-2.0
"""Saves beside the training: what blocks, what waits, what is told, and what ends the run."""

import pytest
import torch

from mprecipes.checkpoint.manifest import verify_folder
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.checkpoint.snapshot import live_tensors, take_snapshot
from mprecipes.errors import CheckpointError, NumericsError
from tests.toys import Run


@pytest.fixture
def plant(monkeypatch):
    """Plants faults, or none."""

    def set_to(faults):
        monkeypatch.setenv("MPRECIPES_FAULT", faults)

    return set_to


def test_a_save_returns_before_it_is_published(tmp_path, plant):
    """The training thread copies and goes on; the checkpoint appears, and is told once."""
    run = Run(tmp_path)
    plant("slow@save.begin")
    run.train([1], wait=False)
    assert run.manager.finished() == []
    assert not (run.folder.checkpoints / "step-00000001").exists()
    run.manager.wait()
    (report,) = run.manager.finished()
    assert (report.step, report.error) == (1, None)
    assert report.blocked_seconds < report.seconds
    assert verify_folder(report.path) == []
    assert run.manager.finished() == []


def test_what_is_written_is_the_state_of_the_save(tmp_path, plant):
    """Steps that go on while the writer is held back do not reach the file."""
    run = Run(tmp_path)
    plant("slow@save.before_digest")
    run.train([1], save=False)
    expected = take_snapshot(live_tensors(run.model, run.optimizer))
    run.save(1, wait=False)
    run.train([2, 3], save=False)
    run.manager.wait()
    other = Run(tmp_path, seed=5)
    other.manager.restore(other.manager.newest_trusted())
    restored = live_tensors(other.model, other.optimizer)
    assert all(torch.equal(restored[name], expected[name]) for name in expected)


def test_one_save_is_in_flight_and_the_next_waits(tmp_path, plant):
    """The second call blocks until the first is published; the wait is counted and reported."""
    run = Run(tmp_path)
    plant("slow@save.begin:1")
    run.train([1, 2], wait=False)
    assert run.manager.candidates()[-1] == 1
    run.manager.wait()
    first, second = run.manager.finished()
    assert 0.1 < second.waited_seconds <= second.blocked_seconds
    assert first.waited_seconds < second.waited_seconds
    assert run.manager.counts["waits"] == 1
    assert run.manager.candidates() == [2, 1]


@pytest.mark.parametrize(
    "fault", ["enospc@save.in_file", "eio@save.before_sync", "exit@save.before_file"]
)
def test_a_failed_save_is_told_and_the_run_goes_on(tmp_path, plant, caplog, fault):
    """Disk full, a failing disk and a dying thread: told, removed, and the next save works."""
    run = Run(tmp_path)
    run.train([1])
    plant(f"{fault}:2")
    run.train([2], wait=False)
    run.manager.wait()
    report = run.manager.finished()[-1]
    assert (report.step, report.path) == (2, None)
    assert "planted fault" in report.error and "saving step 2" in report.error
    assert not run.manager.must_stop
    assert "the run goes on" in caplog.text
    assert run.names() == ["step-00000001"]
    run.train([3])
    assert run.manager.candidates() == [3, 1]
    assert run.manager.counts["failed_saves"] == 1


def test_a_run_may_stop_at_a_failed_save(tmp_path, plant):
    """Policy stop: every rank learns it at the next step, and the next save raises it, once."""
    run = Run(tmp_path, policy=CheckpointPolicy(on_save_failure="stop"))
    plant("eio@save.before_file:1")
    run.train([1], wait=False)
    run.manager.wait()
    assert run.manager.must_stop
    with pytest.raises(CheckpointError, match="planted fault at save.before_file"):
        run.save(2)
    assert not run.manager.must_stop
    assert run.names() == []


def test_a_state_that_cannot_be_saved_always_stops(tmp_path):
    """NaN in the weights ends the run whatever the policy says about disks."""
    run = Run(tmp_path)
    run.model.narrow.detach()[0] = float("nan")
    run.save(1, wait=False)
    run.manager.wait()
    assert run.manager.must_stop
    with pytest.raises(NumericsError, match="weights/narrow"):
        run.save(2, wait=False)


def test_a_synchronous_save_follows_the_policy_too(tmp_path, plant):
    """It blocks until published; a failure is told and the run goes on."""
    run = Run(tmp_path, policy=CheckpointPolicy(synchronous=True))
    plant("enospc@save.in_file:2")
    run.train([1, 2, 3], wait=False)
    assert run.manager.candidates() == [3, 1]
    reports = run.manager.finished()
    assert [report.error is None for report in reports] == [True, False, True]
    assert all(report.blocked_seconds >= report.seconds for report in reports)


def test_leaving_the_context_drains(tmp_path, plant):
    """Also when the loop raises: what was begun is published, and the error is the loop's own."""
    run = Run(tmp_path)
    plant("slow@save.begin")
    with pytest.raises(KeyError), run.manager:
        run.train([1], wait=False)
        raise KeyError
    assert verify_folder(run.folder.checkpoints / "step-00000001") == []
    run.manager.close()


def test_a_save_does_not_wait_for_what_follows_another(tmp_path, plant):
    """A milestone is being copied, slowly: the next save is published meanwhile."""
    run = Run(tmp_path)
    plant(",".join(["slow@milestone.before_copy:1"] * 20))  # 10 seconds
    run.train([1], save=False)
    run.save(1, milestone="warm", wait=False)
    run.train([2], wait=False)
    run.manager.save(run.position(3), facts={}, rank_state={})  # waits for the save of step 2
    assert {1, 2} <= set(run.manager.candidates())
    assert not (run.folder.milestones / "warm").exists()
    run.manager.wait()
    assert (run.folder.milestones / "warm").exists()
    assert run.manager.candidates() == [3, 2, 1]
