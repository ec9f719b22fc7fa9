# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, read-only or silent: a clear error, nothing lost, no hang; on it goes."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mprecipes.checkpoint.manifest import verify_folder
from tests.launching import ROOT, environment
from tests.save_server import run_jobs

pytestmark = pytest.mark.faults

# A private mount name space, as root or as anybody whom the kernel allows a user name space.
TMPFS = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
MOUNT = 'mount -t tmpfs -o size={size}m none "$0" && exec "$@"'
NEIGHBOUR = """
import json, os, sys, threading
from pathlib import Path
from mprecipes.checkpoint.manifest import verify_folder
from mprecipes.errors import CheckpointError
from tests.toys import Run

def fill(path, leave):
    "Somebody else's file, which takes all but so many bytes."
    disk = os.statvfs(path.parent)
    with open(path, "wb", buffering=0) as file:
        try:
            for _ in range((disk.f_bavail * disk.f_frsize - leave) // 65536):
                file.write(bytes(65536))
        except OSError as error:
            assert error.errno == 28, error

def neighbour():
    while not list(run.folder.checkpoints.glob(".staging-*2-*")):
        threading.Event().wait(0.01)
    threading.Event().wait(0.3)  # the free space has been looked at; writing begins in 2 s
    fill(home / "filler", 0)

home = Path(sys.argv[1])
run = Run(home / "run", width=256, num_layers=4)
report = {"found": []}

def save(step):
    try:
        run.train([step])
    except CheckpointError as error:
        report["found"].append([step, error.found, error.expected, error.action])

save(1)
thread = threading.Thread(target=neighbour)
thread.start()
save(2)
thread.join()
(home / "filler").unlink()
save(3)
fill(home / "filler", 8 << 20)
save(4)
(home / "filler").unlink()
save(5)
names = run.names()
report["names"] = names
report["problems"] = [str(p) for n in names for p in verify_folder(run.folder.checkpoints / n)]
print(json.dumps(report))
"""


def pairs(run, action, **more):
    job = {"run": run, "action": action, "world_size": 2, **more}
    return [{**job, "rank": rank} for rank in (0, 1)]


def steps(run):
    """The published steps; fails when one does not verify or something else is there."""
    folders = sorted((run / "checkpoints").iterdir())
    assert [problem for folder in folders for problem in verify_folder(folder)] == []
    return [int(folder.name.removeprefix("step-")) for folder in folders]


def test_a_disk_of_64_mb_that_a_neighbour_fills(tmp_path):
    """Full amid a save is ENOSPC by name; almost full before it is refused with both numbers.

    Each time the older ones stay whole, nothing half is left, and the next save works. Where no
    tmpfs may be mounted the limit of a process takes its place: see the next test.
    """
    shell = [*TMPFS, MOUNT.format(size=64), str(tmp_path)]
    if subprocess.run([*shell, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no tmpfs may be mounted here; EFBIG below takes the same road")
    done = subprocess.run(
        [*shell, sys.executable, "-c", NEIGHBOUR, str(tmp_path)], cwd=ROOT,
        env=environment({"MPRECIPES_FAULT": ",".join(["slow@save.before_digest:2"] * 4)}),
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    (full, found, expected, action), (refused, free, needed, advice) = report["found"]
    assert (full, refused) == (2, 4)
    assert found == "rank 0: OSError: [Errno 28] No space left on device"
    assert "nothing was published, older ones are untouched" in expected
    assert "free space" in action
    assert free.startswith("8.") and free.endswith(" MB are free on the disk of checkpoints/")
    assert "nothing was written, older checkpoints are untouched" in needed
    assert "smaller --keep_last" in advice
    assert report["names"] == ["step-00000001", "step-00000003", "step-00000005"]
    assert report["problems"] == []


def test_a_process_that_may_write_no_large_file(tmp_path):
    """EFBIG on rank 1 alone, in the middle of its file, fails the save of both; step 3 works."""
    jobs = pairs(tmp_path, "train", steps=[1, 2, 3], sizes={"width": 64, "num_layers": 4})
    jobs[1]["limits"] = {"2": {"file_bytes": 8192}, "3": {"file_bytes": None}}
    for result in run_jobs(*jobs):
        (error,) = result["value"]["errors"]
        assert (error["kind"], error["step"]) == ("CheckpointError", 2)
        assert error["found"] == "rank 1: OSError: [Errno 27] File too large"
    assert steps(tmp_path) == [1, 3]


@pytest.mark.parametrize("count", [1, 2])
def test_a_folder_that_becomes_read_only(count):
    """Permission denied is a failed save on every rank, root included; given back, it goes on."""
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)  # pytest's own folders are closed to the user that root becomes
        jobs = pairs(Path(home) / "run", "train", steps=[1, 2, 3, 4])[:count]
        for job in jobs:
            job |= {"world_size": count, "limits": {"2": {"mode": 0o555}, "4": {"mode": 0o755}}}
        for result in run_jobs(*jobs):
            assert result["status"] == 0, result
            errors = result["value"]["errors"]
            assert [error["step"] for error in errors] == [2, 3]
            for error in errors:
                assert error["kind"] == "CheckpointError"
                assert error["found"].startswith("rank 0: PermissionError: [Errno 13]")
        assert steps(Path(home) / "run")[:1] == [1]
        assert steps(Path(home) / "run")[-1] == 4


def test_a_disk_that_hangs_on_one_rank(tmp_path):
    """Rank 1 needs 4 s for its file where 1 s is the limit: both give up, neither hangs."""
    fault = ",".join(["slow@save.before_file:2@rank1"] * 8)
    env = {"MPRECIPES_FAULT": fault}
    began = time.monotonic()
    results = run_jobs(*pairs(tmp_path, "train", steps=[1, 2], env=env, timeout=1))
    assert time.monotonic() - began < 60
    for result in results:
        assert [error["kind"] for error in result["value"]["errors"]] == ["LostPeers"], result
    found = run_jobs(*pairs(tmp_path, "resume", steps=[2]))
    assert [result["value"]["step"] for result in found] == [1, 1]
    assert steps(tmp_path) == [1, 2]


def test_a_disk_that_fails_on_one_rank(tmp_path):
    """EIO at the sync of rank 1's file: named on both ranks, and the next save works."""
    env = {"MPRECIPES_FAULT": "eio@save.before_sync:2@rank1"}
    for result in run_jobs(*pairs(tmp_path, "train", steps=[1, 2, 3], env=env)):
        (error,) = result["value"]["errors"]
        assert error["found"].startswith("rank 1: OSError: [Errno 5] planted fault")
        assert result["value"]["candidates"] == [3, 1]
    assert steps(tmp_path) == [1, 3]
