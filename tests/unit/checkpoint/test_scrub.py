# SPDX-License-Identifier: Apache-2.0
"""Everything that is kept is read again, and what rotted is named."""

import hashlib
import json
import shutil
import threading
import time

import pytest

from mprecipes.checkpoint.milestones import make_milestone
from mprecipes.checkpoint.mirror import Mirror
from mprecipes.checkpoint.scrub import Pace, Scrubber, Stopped, scrub, verify_local
from tests.kept import TENSORS, Folder, flip

BOTH = ["optimizer/layer.weight/exp_avg", "weights/layer.weight"]


@pytest.fixture
def run(tmp_path):
    """Two rolling checkpoints and a milestone, and things that are not kept checkpoints."""
    run = Folder(tmp_path / "mine")
    run.save(8)
    make_milestone(run.save(4), run.milestones, "half")
    (run.checkpoints / ".staging-step-00000012-x").mkdir()
    (run.checkpoints / "evaluations.json").write_text("{}")
    (run.quarantine / "step-00000002").mkdir(parents=True)
    return run


@pytest.fixture
def mirror(tmp_path, run):
    mirror = Mirror(f"file://{tmp_path}/mirror", run.path)
    mirror.push(run.save(12), "checkpoints", "step-00000012", lambda _: None)
    return mirror


def scrubber(run, mirror=None, hours=1000.0):
    damaged = []
    return Scrubber(run.path, hours, mirror, damaged.append, bytes_per_second=1e12), damaged


def test_all_kinds_are_read(run, mirror):
    """Checkpoints, milestones and the mirror, each once, all verifying."""
    found = list(scrub(run.path, mirror))
    assert [(each.kind, each.place, each.step) for each in found] == [
        ("checkpoint", "checkpoints/step-00000004", 4),
        ("checkpoint", "checkpoints/step-00000008", 8),
        ("checkpoint", "checkpoints/step-00000012", 12),
        ("milestone", "milestones/half", 4),
        ("mirrored checkpoint", f"{mirror.home}/checkpoints/step-00000012", 12),
    ]
    assert all(each.problems == [] and each.num_files == 4 for each in found)
    assert all(each.num_bytes > 100 for each in found)


def test_damage_is_named_wherever_it_is(run, mirror, tmp_path):
    """A flipped bit in a milestone and in the mirror: place, file and tensors."""
    flip(run.milestones / "half" / TENSORS)
    flip(tmp_path / "mirror" / "mine" / "checkpoints" / "step-00000012" / TENSORS)
    bad = [each for each in scrub(run.path, mirror) if each.problems]
    assert [each.kind for each in bad] == ["milestone", "mirrored checkpoint"]
    for each in bad:
        (problem,) = each.problems
        assert problem.path == TENSORS
        assert sorted(problem.tensors) == BOTH


def test_a_mirror_that_does_not_answer_is_a_finding(run, tmp_path):
    """Not reaching the second home is as bad as finding it damaged."""
    (tmp_path / "broken").write_text("not a folder")
    mirror = Mirror(f"file://{tmp_path}/broken", run.path)
    found = list(scrub(run.path, mirror))[-1]
    assert (found.kind, found.place) == ("mirror", mirror.home)
    assert "NotADirectoryError" in found.problems[0].found


def test_one_that_is_deleted_meanwhile_is_passed_over(run):
    """Retention is no damage; a missing file in a folder that is there is."""
    folder = run.checkpoints / "step-00000004"
    (folder / TENSORS).unlink()
    found = verify_local(folder, "checkpoint")
    assert found is not None and found.problems[0].found == "missing"

    class Deletes(Pace):
        def digest(self, path):
            shutil.rmtree(path.parent)
            raise FileNotFoundError

    pace = Deletes(threading.Event())
    assert verify_local(run.checkpoints / "step-00000008", "checkpoint", pace) is None


def test_a_round_reports_warns_and_tells_of_damage(run, mirror, caplog):
    """What does not verify is in the log, the counts and the report; nothing is moved."""
    flip(run.checkpoints / "step-00000008" / TENSORS)
    flip(run.milestones / "half" / TENSORS)
    each, damaged = scrubber(run, mirror)
    assert len(each.round()) == 5
    assert damaged == [8]
    counts = each.counts
    assert (counts["scrubs"], counts["scrubbed"], counts["scrub_problems"]) == (1, 5, 2)
    assert f"checkpoints/step-00000008 does not verify any more: {TENSORS}: sha256" in caplog.text
    report = json.loads((run.path / "reports" / "scrub.json").read_text())
    assert report["checked"] == 5
    assert [problem["place"] for problem in report["problems"]] == [
        "checkpoints/step-00000008", "milestones/half",
    ]  # fmt: skip
    assert sorted(report["problems"][0]["tensors"]) == BOTH
    assert (run.checkpoints / "step-00000008").is_dir()
    assert abs(report["time"] - time.time()) < 600


def test_the_interval_counts_over_restarts(run):
    """A run restarted before each round is due is scrubbed all the same."""
    first, _ = scrubber(run, hours=2.0)
    assert 7100 < first._seconds_left() <= 7200
    path = run.path / "reports" / "scrub.json"
    report = json.loads(path.read_text())
    path.write_text(json.dumps({**report, "time": report["time"] - 7000}))
    second, _ = scrubber(run, hours=2.0)
    assert 0 < second._seconds_left() <= 200
    path.write_text(json.dumps({**report, "time": report["time"] - 9000}))
    assert second._seconds_left() == 0


def test_the_thread_scrubs_when_due_and_ends(run):
    """A round that is due runs in the background, at the lowest priority, until it is closed."""
    path = run.path / "reports" / "scrub.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"time": 0.0}))
    flip(run.checkpoints / "step-00000004" / TENSORS)
    told = threading.Event()
    each = Scrubber(run.path, 1.0, None, lambda step: told.set(), bytes_per_second=1e12)
    each.start()
    each.start()
    assert told.wait(60)
    each.close()
    assert not each._thread.is_alive()
    assert each.is_idle


def test_closing_what_was_never_started(run):
    """A scrubber whose first round is far away ends at once, started or not."""
    idle, _ = scrubber(run)
    idle.close()
    waiting, _ = scrubber(run)
    waiting.start()
    waiting.close()
    assert waiting.counts == {}


def test_the_pace_holds_a_rate(tmp_path):
    """After a second's worth of bytes it waits a second; without bytes it does not wait."""
    now, waited = [100.0], []

    class Event(threading.Event):
        def wait(self, timeout=None):
            waited.append(timeout)
            return False

    pace = Pace(Event(), 1000.0, clock=lambda: now[0])
    pace(0)
    pace(500)
    pace(500)
    now[0] = 200.0
    pace(0)
    assert waited == [0.0, 0.5, 1.0, 0.0]


def test_the_pace_gives_up_when_told(tmp_path):
    """A stop ends the reading of a file in the middle."""
    stop = threading.Event()
    (tmp_path / "file").write_bytes(b"x" * 3000)
    pace = Pace(stop, 1e12)
    assert pace.digest(tmp_path / "file") == hashlib.sha256(b"x" * 3000).hexdigest()
    stop.set()
    with pytest.raises(Stopped):
        pace.digest(tmp_path / "file")
