# SPDX-License-Identifier: Apache-2.0
"""One process holds a run folder: races have one winner, and the dead are found out."""

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest

from mprecipes.errors import RunFolderBusy
from mprecipes.identity import lease as lease_module
from mprecipes.identity.lease import FILE, LOCK_FILE, Holder, Lease, read_holder

fork = multiprocessing.get_context("fork")


def plant(folder, **facts):
    """Writes a lease as another process would have left it."""
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "heartbeat": time.time()} | facts
    (folder / FILE).write_text(json.dumps(holder))


def dead_pid():
    child = fork.Process(target=int)
    child.start()
    child.join()
    return child.pid


def hold(folder, pipe):
    """Takes the lease in a process of its own, says so, and holds it until told otherwise."""
    lease = Lease.acquire(folder)
    pipe.send(lease.taken_over and lease.taken_over.pid)
    pipe.recv()
    lease.release()


@pytest.fixture
def holder_process(tmp_path):
    """A live process that holds the lease of tmp_path, with the pipe that makes it release."""
    ours, theirs = fork.Pipe()
    process = fork.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    assert ours.recv() is None
    yield process, ours
    if process.is_alive():
        process.kill()
    process.join()


def test_lease_names_its_holder_and_goes_with_it(tmp_path):
    """While held, lease.json says who, since when and which attempt; afterwards it is gone."""
    before = time.time()
    lease = Lease.acquire(tmp_path)
    lease.start(3, lambda: 17)
    facts = json.loads((tmp_path / FILE).read_text())
    assert (facts["host"], facts["pid"]) == (socket.gethostname(), os.getpid())
    assert (facts["attempt"], facts["step"]) == (3, 17)
    assert before <= facts["heartbeat"] <= time.time()
    assert lease.taken_over is None
    lease.check()
    lease.release()
    assert os.listdir(tmp_path) == [LOCK_FILE]


def test_live_process_is_refused_by_name(tmp_path, holder_process):
    """A second launch is refused with host, pid and age, and succeeds once the first is done."""
    process, pipe = holder_process
    with pytest.raises(RunFolderBusy) as caught:
        Lease.acquire(tmp_path)
    assert caught.value.found == (
        f"process {process.pid} on {socket.gethostname()} (attempt 0) is running here, "
        "last heartbeat 0 s ago"
    )
    assert caught.value.expected == "no other live process in this run folder"
    assert caught.value.where == str(tmp_path / FILE)
    assert caught.value.action.startswith(f"wait for it, or stop it (kill {process.pid})")
    pipe.send("release")
    process.join()
    lease = Lease.acquire(tmp_path)
    assert lease.taken_over is None
    lease.release()


def test_live_process_of_this_host_is_live_however_old_its_heartbeat(tmp_path, holder_process):
    """A stopped or busy process of this machine keeps its lease."""
    plant(tmp_path, **asdict(replace(read_holder(tmp_path), heartbeat=1.0)))
    with pytest.raises(RunFolderBusy):
        Lease.acquire(tmp_path)


def test_killed_process_is_taken_over_at_once(tmp_path, holder_process):
    """After SIGKILL the lease is free, also while the parent has not reaped the zombie."""
    process, _ = holder_process
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie
    lease = Lease.acquire(tmp_path)
    assert lease.taken_over.pid == process.pid
    lease.release()


def test_reused_pid_is_not_the_holder(tmp_path):
    """A live process that has the dead holder's number started at another time."""
    plant(tmp_path, pid=os.getpid(), process_start=1)
    lease = Lease.acquire(tmp_path)
    assert lease.taken_over.process_start == 1
    lease.release()


@pytest.mark.parametrize(
    ("facts", "is_live"),
    [
        ({"host": "elsewhere", "pid": 1}, True),
        ({"host": "elsewhere", "pid": 1, "age": 59}, True),
        ({"host": "elsewhere", "pid": 1, "age": 61}, False),
        ({"host": "elsewhere", "age": 61}, False),
        ({"machine": "another container of the same name", "pid": 1, "age": 59}, True),
        ({"machine": "another container of the same name", "age": 61}, False),
    ],
)
def test_holder_elsewhere_lives_for_60_seconds(tmp_path, facts, is_live):
    """A pid of another machine or container says nothing; its heartbeat decides."""
    plant(tmp_path, heartbeat=time.time() - facts.pop("age", 0), **facts)
    assert read_holder(tmp_path).is_live is is_live
    if not is_live:
        Lease.acquire(tmp_path).release()
        return
    with pytest.raises(RunFolderBusy) as caught:
        Lease.acquire(tmp_path)
    assert "if it is dead launch again in" in caught.value.action
    assert "clock" not in caught.value.found


def test_a_clock_that_is_ahead_is_told(tmp_path):
    """A dead machine whose clock was two hours ahead holds the folder for as long."""
    plant(tmp_path, host="elsewhere", heartbeat=time.time() + 7200)
    with pytest.raises(RunFolderBusy) as caught:
        Lease.acquire(tmp_path)
    assert re.search(r"by a clock that is (7200|7199) s ahead of the one here", caught.value.found)
    assert re.search(r"launch again in (7260|7259) s;", caught.value.action)
    assert "remove lease.json" in caught.value.action


def test_unreadable_lease_counts_as_held_since_its_last_change(tmp_path):
    """Garbage in lease.json is respected for a minute and then taken over."""
    (tmp_path / FILE).write_text('{"host":')
    with pytest.raises(RunFolderBusy):
        Lease.acquire(tmp_path)
    os.utime(tmp_path / FILE, (time.time() - 61,) * 2)
    lease = Lease.acquire(tmp_path)
    assert lease.taken_over.host == "unknown"
    lease.release()


def race(folder, start, results, release):
    start.wait()
    try:
        lease = Lease.acquire(folder)
    except RunFolderBusy:
        results.put("busy")
        return
    results.put("won")
    release.wait()
    lease.release()


@pytest.mark.parametrize("before", ["nothing", "a dead holder"])
def test_simultaneous_launches_have_one_winner(tmp_path, before):
    """Of two processes that start at the same moment exactly one gets the lease, every time."""
    pid = dead_pid()
    for number in range(15):
        folder = tmp_path / str(number)
        folder.mkdir()
        if before == "a dead holder":
            plant(folder, pid=pid, token="dead")
        start, release, results = fork.Barrier(2), fork.Event(), fork.Queue()
        racers = [
            fork.Process(target=race, args=(folder, start, results, release)) for _ in range(2)
        ]
        for racer in racers:
            racer.start()
        found = sorted(results.get(timeout=30) for _ in racers)
        release.set()
        for racer in racers:
            racer.join()
        assert found == ["busy", "won"], f"round {number}"
        assert not (folder / FILE).exists()


def test_heartbeat_is_renewed(tmp_path):
    """The thread writes new heartbeats with the step last told."""
    lease, step, seen = Lease.acquire(tmp_path), iter(range(1000)), threading.Event()

    def next_step():
        number = next(step)
        if number >= 3:
            seen.set()
        return number

    lease.start(0, next_step, seconds=0.001)
    assert seen.wait(timeout=30)
    lease.release()
    assert lease.num_failed_heartbeats == 0


def test_nothing_is_written_after_release(tmp_path):
    """A heartbeat that comes after release leaves the folder without a lease."""
    lease = Lease.acquire(tmp_path)
    lease.start(0, int, seconds=0.0001)
    lease.release()
    assert "lease" not in [thread.name for thread in threading.enumerate()]
    lease.beat()
    assert os.listdir(tmp_path) == [LOCK_FILE]


def test_failed_heartbeat_is_counted_and_stops_nothing(tmp_path, monkeypatch, caplog):
    """A disk error in the heartbeat is counted, logged once, and over when the disk is back."""
    lease = Lease.acquire(tmp_path)

    def broken(path, value):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lease_module, "write_json_atomically", broken)
        lease.beat()
        lease.beat()
    assert lease.num_failed_heartbeats == 2
    assert caplog.text.count("heartbeat not written") == 1
    lease.beat()
    assert lease.num_failed_heartbeats == 2
    lease.release()
    assert not (tmp_path / FILE).exists()


def test_lost_lease_is_noticed_and_not_taken_back(tmp_path):
    """A holder that was taken for dead stops writing when it wakes, and leaves the new lease."""
    lease = Lease.acquire(tmp_path)
    plant(tmp_path, pid=4242, token="another", host="elsewhere")
    lease.beat()
    assert lease.is_lost
    with pytest.raises(RunFolderBusy) as caught:
        lease.check()
    assert "process 4242 on elsewhere" in caught.value.found
    lease.release()
    assert read_holder(tmp_path).token == "another"


def test_deleted_lease_is_written_again(tmp_path):
    """A lease file that somebody removed comes back with the next heartbeat."""
    lease = Lease.acquire(tmp_path)
    (tmp_path / FILE).unlink()
    lease.beat()
    assert read_holder(tmp_path).pid == os.getpid()
    lease.release()


def test_readers_never_see_half_a_lease(tmp_path):
    """While heartbeats are written, every read gives a whole lease."""
    lease = Lease.acquire(tmp_path)
    lease.start(0, int, seconds=0.0)
    hosts = {read_holder(tmp_path).host for _ in range(300)}
    lease.release()
    assert hosts == {socket.gethostname()}


def test_folder_without_lease_has_no_holder(tmp_path):
    """No lease file means nobody."""
    assert read_holder(tmp_path) is None


def test_exit_without_release_leaves_a_stale_lease(tmp_path):
    """A process that ends without a word does not hang on its heartbeat thread, and is dead."""
    code = (
        "import sys; from pathlib import Path; from mprecipes.identity.lease import Lease\n"
        "Lease.acquire(Path(sys.argv[1])).start(0, int)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert not read_holder(tmp_path).is_live
    assert isinstance(read_holder(tmp_path), Holder)
