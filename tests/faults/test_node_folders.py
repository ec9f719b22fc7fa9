# SPDX-License-Identifier: Apache-2.0
"""Each node has a disk of its own: three processes, two on node 0 and one on node 1."""

import shutil
import signal

import pytest

from mprecipes.checkpoint.manifest import read_manifest, verify_folder
from tests.save_server import run_jobs

pytestmark = pytest.mark.faults
LOCAL_RANKS = (0, 1, 0)
FIRSTS = (0, 2)
POINTS = [
    "save.after_file", "exchange.in_file", "save.after_gather", "save.before_manifest",
    "save.before_publish", "save.after_rename", "save.after_publish", "save.after_commit",
]  # fmt: skip
BY_ALL = ("save.after_file", "save.after_gather", "save.after_commit")


def node(folder, rank):
    return folder / ("node1" if rank == 2 else "node0")


def run_nodes(folder, action, **more):
    """Gives what each rank said."""
    return run_jobs(
        *(
            {"run": node(folder, rank), "action": action, "rank": rank, "world_size": 3}
            | {"local_rank": local, "timeout": 20, **more}
            for rank, local in enumerate(LOCAL_RANKS)
        )
    )


def step_folder(folder, rank, step):
    return node(folder, rank) / "checkpoints" / f"step-{step:08d}"


def names(folder, rank, part="checkpoints"):
    parent = node(folder, rank) / part
    return sorted(path.name for path in parent.iterdir()) if parent.is_dir() else []


def contents(path):
    return {each.name: each.read_bytes() for each in path.iterdir()}


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def resumed(folder, step, **more):
    """Resumes on all ranks and fails unless they agree on the step and its every bit."""
    results = [result["value"] for result in run_nodes(folder, "resume", **more)]
    for rank, value in enumerate(results):
        assert (value["step"], value["state"]) == (step, {"draws": step})
        assert value["digests_agree"] and value["problems"] == []
        assert verify_folder(step_folder(folder, rank, step)) == []
    assert contents(step_folder(folder, 0, step)) == contents(step_folder(folder, 2, step))
    return results


def test_every_node_holds_all_of_the_same(tmp_path):
    """One manifest, every file of every rank, byte for byte, and retention on each disk."""
    run_nodes(tmp_path, "train", steps=[1, 2, 3])
    for rank in FIRSTS:
        assert names(tmp_path, rank) == ["step-00000002", "step-00000003"]
        manifest = read_manifest(step_folder(tmp_path, rank, 3))
        assert {entry.rank for entry in manifest.files} == {0, 1, 2}
        assert verify_folder(manifest.folder) == []
    assert contents(step_folder(tmp_path, 0, 3)) == contents(step_folder(tmp_path, 2, 3))
    resumed(tmp_path, 3)


@pytest.mark.parametrize("rank", FIRSTS)
def test_a_lost_disk_is_filled_from_the_other(tmp_path, rank):
    """The newest checkpoint comes back to the node that lost everything."""
    run_nodes(tmp_path, "train", steps=[1, 2])
    shutil.rmtree(node(tmp_path, rank))
    results = resumed(tmp_path, 2)
    assert all(value["refused"] == [] for value in results)
    assert names(tmp_path, rank) == ["step-00000002"]


@pytest.mark.parametrize("rank", FIRSTS)
def test_a_damaged_copy_is_replaced(tmp_path, rank):
    """It goes to quarantine where it is damaged, and no step is lost."""
    run_nodes(tmp_path, "train", steps=[1, 2])
    flip(step_folder(tmp_path, rank, 2) / "tensors-rank00001-000.safetensors")
    results = resumed(tmp_path, 2)
    refused = [f"step-00000002 on the node of rank {rank}"]
    assert all(value["refused"] == refused for value in results)
    for each in FIRSTS:
        found = ["step-00000002", "step-00000002.reason.json"] if each == rank else []
        assert names(tmp_path, each, "quarantine") == found


def test_damaged_everywhere_means_the_older_one(tmp_path):
    """Both copies are refused by name, each on its node."""
    run_nodes(tmp_path, "train", steps=[1, 2])
    flip(step_folder(tmp_path, 0, 2) / "tensors-rank00001-000.safetensors")
    flip(step_folder(tmp_path, 2, 2) / "tensors-rank00000-000.safetensors")
    (first, *_) = resumed(tmp_path, 1)
    assert first["refused"] == [f"step-00000002 on the node of rank {rank}" for rank in FIRSTS]


def test_a_copy_that_is_damaged_where_it_is_sent_from(tmp_path):
    """Node 1 has none and node 0 a damaged one: it is not spread, and the older one is taken."""
    run_nodes(tmp_path, "train", steps=[1, 2])
    shutil.rmtree(step_folder(tmp_path, 2, 2))
    flip(step_folder(tmp_path, 0, 2) / "tensors-rank00001-000.safetensors")
    (first, *_) = resumed(tmp_path, 1)
    assert first["refused"] == ["step-00000002 on the node of rank 0"]
    assert names(tmp_path, 2) == ["step-00000001"]


def test_two_runs_of_one_step_are_not_one_checkpoint(tmp_path):
    """That of rank 0's node counts; the other one is refused there and replaced."""
    run_nodes(tmp_path, "train", steps=[1])
    run_nodes(tmp_path / "other", "train", steps=[7, 1])
    shutil.rmtree(step_folder(tmp_path, 2, 1))
    shutil.copytree(step_folder(tmp_path / "other", 2, 1), step_folder(tmp_path, 2, 1))
    (first, *_) = resumed(tmp_path, 1)
    assert first["refused"] == ["step-00000001 on the node of rank 2"]


@pytest.mark.parametrize("fault", ["enospc@save.after_file:2", "eio@exchange.in_file"])
@pytest.mark.parametrize("rank", FIRSTS)
def test_a_disk_that_fails_fails_the_save_on_all(tmp_path, fault, rank):
    """In writing or in exchanging: nothing is published on any node, and the next save succeeds."""
    run_nodes(tmp_path, "train", steps=[1])
    env = {"MPRECIPES_FAULT": f"{fault}@rank{rank}"}
    for result in run_nodes(tmp_path, "train", steps=[1, 2], env=env):
        (error,) = result["value"]["errors"]
        assert (error["kind"], error["step"]) == ("CheckpointError", 2)
        assert error["found"].startswith(f"rank {rank}: OSError")
    assert [names(tmp_path, each) for each in FIRSTS] == [["step-00000001"]] * 2
    run_nodes(tmp_path, "train", steps=[3])
    assert [names(tmp_path, each) for each in FIRSTS] == [["step-00000001", "step-00000003"]] * 2


def test_a_step_that_one_node_lost_is_saved_anew(tmp_path):
    """Deleted by hand on one node while the run goes on: the other's copy is set aside."""
    run_nodes(tmp_path, "train", steps=[1, 2])
    shutil.rmtree(step_folder(tmp_path, 2, 2))
    results = run_nodes(tmp_path, "train", steps=[1, 2])
    assert [result["value"]["errors"] for result in results] == [[], [], []]
    assert names(tmp_path, 0, "quarantine") == ["step-00000002", "step-00000002.reason.json"]
    resumed(tmp_path, 2)


def check_killed(folder, point, rank):
    run_nodes(folder, "train", steps=[1])
    step = "" if point.startswith("exchange") else ":2"
    fault = {"MPRECIPES_FAULT": f"kill@{point}{step}@rank{rank}"}
    results = run_nodes(folder, "train", steps=[1, 2], env=fault)
    assert results[rank] == {"status": -signal.SIGKILL}
    published = any(step_folder(folder, each, 2).exists() for each in FIRSTS)
    resumed(folder, 2 if published else 1)
    for each in FIRSTS:
        assert names(folder, each) == ["step-00000001", "step-00000002"][: 1 + published]
        assert names(folder, each, "quarantine") == []


@pytest.mark.parametrize(
    ("point", "rank"),
    [("exchange.in_file", 2), ("save.after_rename", 0), ("save.after_publish", 2)],
)
def test_killed_in_a_save(tmp_path, point, rank):
    """What one node published is the run's: the other is sent it; else the one before is found."""
    check_killed(tmp_path, point, rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "rank"),
    [(point, rank) for point in POINTS for rank in ((0, 1, 2) if point in BY_ALL else FIRSTS)],
)
def test_killed_anywhere_in_a_save(tmp_path, point, rank):
    """Every point on every rank that reaches it."""
    check_killed(tmp_path, point, rank)


def test_killed_while_a_lost_checkpoint_is_sent(tmp_path):
    """What arrived in part is no checkpoint; the next launch is sent it again."""
    run_nodes(tmp_path, "train", steps=[1, 2])
    shutil.rmtree(step_folder(tmp_path, 2, 2))
    fault = {"MPRECIPES_FAULT": "kill@supply.before_publish:2@rank2"}
    results = run_nodes(tmp_path, "resume", env=fault)
    assert results[2] == {"status": -signal.SIGKILL}
    resumed(tmp_path, 2)
