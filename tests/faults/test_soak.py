# SPDX-License-Identifier: Apache-2.0
"""The soak survives a few kills, and it sees every kind of loss it is there to see."""

import shutil
import signal

import pytest

from tests.faults.soak import Loss, Record, check_ends, soak
from tests.kept import Folder, flip

pytestmark = pytest.mark.faults


def test_a_few_kills(tmp_path, capsys, monkeypatch):
    """Nine random kills of the toy on one and on two ranks: none costs more than steps."""
    monkeypatch.setenv("MPRECIPES_CACHE", str(tmp_path / "cache"))
    assert soak(tmp_path, 9, 0, 120.0, 20240) == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:-1]] == [f"kill {n:3d}" for n in range(1, 10)]
    assert lines[-1].startswith("soak: 9 kills survived (0 of the recipe), nothing lost but ")


def test_time_is_bounded(tmp_path, capsys, monkeypatch):
    """Without time left nothing is begun, and that is said."""
    monkeypatch.setenv("MPRECIPES_CACHE", str(tmp_path / "cache"))
    assert soak(tmp_path, 9, 0, -1.0, 1) == 0
    assert "are over after 0 kills" in capsys.readouterr().out


KILLED, RAISED = {"status": -signal.SIGKILL}, {"status": 1, "error": {"kind": "RuntimeError"}}
DONE = {"status": 0, "value": {}}


@pytest.mark.parametrize("results", [[KILLED], [KILLED, KILLED], [KILLED, RAISED]])
def test_ends_by_the_signal(results):
    """The second of two may see that the first is gone before its own signal comes."""
    check_ends(results)


@pytest.mark.parametrize("results", [[RAISED], [DONE], [RAISED, RAISED], [KILLED, DONE]])
def test_an_end_of_its_own_is_a_loss(results):
    """An error that nobody's death explains, or a rank that goes on as if nothing had happened."""
    with pytest.raises(Loss, match="ended by itself"):
        check_ends(results)


@pytest.fixture
def run(tmp_path):
    """A run folder with checkpoints of steps 3, 6 and 9, judged once."""
    folder = Folder(tmp_path)
    folder.save(3, 6, 9)
    record = Record(tmp_path)
    assert record.after_kill(11).step == 9
    assert (record.steps, record.lost) == ([3, 6, 9], [2])
    return folder, record


def test_steps_lost_are_counted(run):
    """From the newest checkpoint to the last step that was trained."""
    folder, record = run
    folder.save(12)
    assert record.after_kill(17, published=12).step == 12
    assert record.lost == [2, 5]


def test_a_flipped_bit_is_a_loss(run):
    """In any checkpoint, not only the newest."""
    folder, record = run
    flip(folder.checkpoints / "step-00000003" / "rank-00000.json")
    with pytest.raises(Loss, match="does not verify: {'step-00000003'"):
        record.after_kill(11)


def test_a_newest_that_is_gone_is_a_loss(run):
    """Also when two older ones are left."""
    folder, record = run
    shutil.rmtree(folder.checkpoints / "step-00000009")
    with pytest.raises(Loss, match=r"\[3, 6\] are left; \[3, 6, 9\] were there"):
        record.after_kill(11)


def test_a_published_step_that_never_was_is_a_loss(run):
    """A process had been told that step 10 is safe."""
    _, record = run
    with pytest.raises(Loss, match="10 was published"):
        record.after_kill(11, published=10)


def test_too_few_are_a_loss(run):
    """One is left where two are kept."""
    folder, record = run
    shutil.rmtree(folder.checkpoints / "step-00000003")
    shutil.rmtree(folder.checkpoints / "step-00000006")
    with pytest.raises(Loss, match=r"\[3, 6, 9\] before, \[9\] after"):
        record.after_kill(11)
