# SPDX-License-Identifier: Apache-2.0
"""The mirror follows in the background, whatever happens to it."""

import shutil
import subprocess
import sys
import threading
import time

import pytest

from mprecipes.checkpoint.manifest import read_manifest
from mprecipes.checkpoint.mirror import Mirror
from mprecipes.checkpoint.mirroring import Mirroring
from mprecipes.errors import ConfigError
from tests.kept import Folder

PATIENCE = 60


@pytest.fixture
def run(tmp_path):
    return Folder(tmp_path / "mine")


@pytest.fixture
def mirror(tmp_path, run):
    return Mirror(f"file://{tmp_path}/mirror", run.path)


class Follower:
    """A mirroring of everything in a run folder, and what is to be deleted at the mirror."""

    def __init__(self, run, mirror, pauses=(0.0, 0.0)):
        self.run, self.surplus = run, set()
        self.mirroring = Mirroring(
            mirror, run.run_id, next_copy=self.next_copy, surplus=self.give_up,
            earlier=lambda: {"earlier-run"}, pauses=pauses,
        )  # fmt: skip

    def next_copy(self, there):
        for folder in sorted(self.run.checkpoints.glob("[!.]*"), reverse=True):
            manifest = read_manifest(folder)
            if there.get(("checkpoints", folder.name)) != manifest.root_sha256:
                return "checkpoints", folder.name, manifest
        return None

    def give_up(self, rolling):
        return [each for each in rolling if each.manifest.step in self.surplus]


def steps(mirror):
    found = mirror.published()
    assert all(mirror.verify(each, lambda _: None) == [] for each in found)
    return [each.manifest.step for each in found]


def test_close_brings_all_there(run, mirror):
    """What is missing is copied and verified there, and the mirror is this run's."""
    run.save(4, 8)
    follower = Follower(run, mirror)
    follower.mirroring.wake()
    follower.mirroring.close(drain=True, seconds=PATIENCE)
    assert steps(mirror) == [8, 4]
    assert mirror.owner()["writer"] == run.run_id
    counts = follower.mirroring.counts
    assert (counts["mirrored"], counts["mirror_errors"]) == (2, 0)
    assert counts["mirror_bytes"] == sum(
        path.stat().st_size for path in run.checkpoints.glob("*/*")
    )
    assert follower.mirroring.is_idle


def test_what_is_too_much_is_deleted_after_the_copies(run, mirror):
    """The plan's surplus goes, and only once what replaces it is there."""
    run.save(4)
    first = Follower(run, mirror)
    first.mirroring.update()
    run.save(8)
    shutil.rmtree(run.checkpoints / "step-00000004")
    second = Follower(run, mirror)
    second.surplus = {4}
    second.mirroring.update()
    assert steps(mirror) == [8]
    assert second.mirroring.counts["mirror_deleted"] == 1


@pytest.mark.parametrize("point", ["before_file", "before_manifest"])
def test_a_failed_copy_deletes_nothing_there(run, mirror, monkeypatch, caplog, point):
    """With a mirror that fails, all tries are counted and told, and what is there stays."""
    run.save(4)
    Follower(run, mirror).mirroring.update()
    run.save(8)
    follower = Follower(run, mirror)
    follower.surplus = {4}
    monkeypatch.setenv("MPRECIPES_FAULT", f"eio@mirror.{point}:8")
    follower.mirroring.wake()
    follower.mirroring.close(drain=True, seconds=PATIENCE)
    assert steps(mirror) == [4]
    assert follower.mirroring.counts["mirror_errors"] >= 3
    assert "next try in 0 s" in caplog.text and "after the next save" in caplog.text
    monkeypatch.delenv("MPRECIPES_FAULT")
    follower.mirroring.update()
    assert steps(mirror) == [8]


def test_a_copy_that_succeeds_at_the_second_try(run, mirror, monkeypatch):
    """A mirror that comes back is used without a word from anybody."""
    run.save(4)
    tries = []
    publish = mirror.published

    def published(*kinds):
        tries.append(1)
        if len(tries) == 1:
            raise TimeoutError("no answer")
        return publish(*kinds)

    monkeypatch.setattr(mirror, "published", published)
    follower = Follower(run, mirror)
    follower.mirroring.wake()
    follower.mirroring.close(drain=True, seconds=PATIENCE)
    monkeypatch.undo()
    assert steps(mirror) == [4]
    assert follower.mirroring.counts["mirror_errors"] == 1


def test_another_runs_mirror_is_left_alone(run, mirror, caplog):
    """Nothing is written or deleted there, it is said once, and the thread ends in peace."""
    other = Folder(run.path.parent / "other" / "mine", run_id="ffffffffffff")
    other.save(4)
    Follower(other, mirror).mirroring.update()
    run.save(8)
    follower = Follower(run, mirror)
    with pytest.raises(ConfigError):
        follower.mirroring.update()
    for _ in range(2):
        follower.mirroring.wake()
    follower.mirroring.close(drain=True, seconds=PATIENCE)
    assert steps(mirror) == [4]
    assert caplog.text.count("run ffffffffffff writes here") == 1
    assert follower.mirroring.counts["mirror_errors"] == 1


def test_a_run_that_went_on_elsewhere_loses_its_mirror(run, mirror):
    """Once a later run has claimed it, the earlier one writes no more; the later one may."""
    run.save(4)
    first = Follower(run, mirror)
    first.mirroring.update()
    mirror.claim("later-run", [run.run_id])
    run.save(8)
    with pytest.raises(ConfigError):
        first.mirroring.update()
    assert steps(mirror) == [4]
    mirror.claim("earlier-run")
    Follower(run, mirror).mirroring.update()
    assert steps(mirror) == [8, 4]
    assert mirror.owner()["writer"] == run.run_id


def test_a_checkpoint_that_is_deleted_meanwhile_is_passed_over(run, mirror):
    """It is counted as skipped, not as an error, and the rest is copied."""
    run.save(4, 8)
    follower = Follower(run, mirror)
    real = follower.next_copy

    def next_copy(there):
        copy = real(there)
        if copy and copy[2].step == 8:
            shutil.rmtree(copy[2].folder)
        return copy

    follower.mirroring._next_copy = next_copy
    follower.mirroring.update()
    assert steps(mirror) == [4]
    assert follower.mirroring.counts["mirror_skipped"] == 1


def test_without_draining_it_ends_at_once(run, mirror):
    """A stop is obeyed between two chunks; what was not finished is no checkpoint there."""
    run.save(4)
    reached, go = threading.Event(), threading.Event()
    follower = Follower(run, mirror)
    real = follower.next_copy

    def next_copy(there):
        reached.set()
        go.wait(PATIENCE)
        return real(there)

    follower.mirroring._next_copy = next_copy
    follower.mirroring.wake()
    assert reached.wait(PATIENCE)
    assert not follower.mirroring.is_idle
    follower.mirroring._stop.set()
    go.set()
    follower.mirroring.close(drain=False, seconds=PATIENCE)
    assert mirror.published() == []
    assert follower.mirroring.counts["mirror_errors"] == 0


def test_a_mirror_that_hangs_does_not_hold_the_end_up(run, mirror, caplog):
    """After its time limit the end of the run goes on, and says what is missing."""
    run.save(4)
    reached, go = threading.Event(), threading.Event()
    follower = Follower(run, mirror)

    def next_copy(there):
        reached.set()
        go.wait(PATIENCE)

    follower.mirroring._next_copy = next_copy
    follower.mirroring.wake()
    assert reached.wait(PATIENCE)
    follower.mirroring.close(drain=True, seconds=0.0)
    go.set()
    assert "not up to date" in caplog.text
    assert follower.mirroring.counts["mirror_errors"] == 1


def test_without_draining_a_file_on_its_way_is_not_waited_for(run, mirror, monkeypatch):
    """The end goes on after about a second; the copy that was cut off is made up for."""
    run.save(4)
    reached, go = threading.Event(), threading.Event()
    put_file = mirror._fs.put_file

    def hang(*arguments):
        reached.set()
        go.wait(PATIENCE)
        put_file(*arguments)

    monkeypatch.setattr(mirror._fs, "put_file", hang)
    follower = Follower(run, mirror)
    follower.mirroring.wake()
    assert reached.wait(PATIENCE)
    began = time.monotonic()
    follower.mirroring.close(drain=False, seconds=600.0)
    assert time.monotonic() - began < PATIENCE / 2
    assert follower.mirroring._thread.is_alive() and not go.is_set()
    assert mirror.published() == []
    go.set()
    follower.mirroring._thread.join(PATIENCE)
    assert not follower.mirroring._thread.is_alive()
    assert mirror.published() == []
    assert follower.mirroring.counts["mirror_errors"] == 0
    monkeypatch.undo()
    Follower(run, mirror).mirroring.update()
    assert steps(mirror) == [4]


HANGS_AT_EXIT = """
import sys, threading
from pathlib import Path
from mprecipes.checkpoint.policy import CheckpointPolicy
from tests.toys import Run

home = Path(sys.argv[1])
(home / "run").mkdir()
run = Run(home / "run", policy=CheckpointPolicy(mirror=f"file://{home}/mirror"))
reached = threading.Event()

def hang(*arguments):
    reached.set()
    threading.Event().wait()

run.manager._aftercare._mirroring._mirror._fs.put_file = hang
run.train([1])
assert reached.wait(60)
run.manager.close(drain_mirror=False)
print("closed", flush=True)
"""


def test_a_file_on_its_way_does_not_hold_the_process(tmp_path):
    """A process whose mirror never answers ends all the same, with its exit code."""
    command = [sys.executable, "-c", HANGS_AT_EXIT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


def test_closing_what_was_never_used(run, mirror):
    """No thread is started for nothing, nor left behind."""
    before = threading.active_count()
    Follower(run, mirror).mirroring.close(drain=True, seconds=PATIENCE)
    assert threading.active_count() == before
