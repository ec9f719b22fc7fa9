# SPDX-License-Identifier: Apache-2.0
"""Saves by two real processes: half the bytes each, one failure is both's, any number may load."""

import signal

import pytest

from mprecipes.checkpoint.manifest import read_manifest, verify_folder
from tests.save_server import run_jobs

pytestmark = pytest.mark.faults


def ranks(run, action, count, **more):
    return [
        {"run": run, "action": action, "rank": rank, "world_size": count, **more}
        for rank in range(count)
    ]


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_two_write_half_each_and_any_number_reads(tmp_path, readers):
    """Neither writes more than 51 % of the bytes; each reader has every bit, and its own state."""
    sizes = {"width": 64, "num_layers": 8}
    results = run_jobs(*ranks(tmp_path, "train", 2, steps=[1, 2], sizes=sizes, ddp=True))
    shares = [result["value"]["rank_bytes"][-1] for result in results]
    manifest = read_manifest(tmp_path / "checkpoints" / "step-00000002")
    assert [entry.path for entry in manifest.files] == [
        "tensors-rank00000-000.safetensors",
        "rank-00000.json",
        "tensors-rank00001-000.safetensors",
        "rank-00001.json",
    ]
    assert sum(shares) == sum(entry.bytes for entry in manifest.files)
    assert "embed.weight" in manifest.params
    assert max(shares) < 0.51 * sum(shares)
    found = run_jobs(*ranks(tmp_path, "resume", readers, sizes=sizes))
    for rank, result in enumerate(found):
        assert result["value"]["step"] == 2
        assert result["value"]["digests_agree"]
        assert result["value"]["state"] == ({"draws": 2} if rank < 2 else {})


@pytest.mark.parametrize(
    "fault", ["eio@save.before_file:2@rank1", "enospc@save.after_file:2@rank0", "eio@save.begin:2"]
)
def test_one_failing_rank_fails_the_save_for_all(tmp_path, fault):
    """Both ranks get the error that names the rank; nothing is published; the next save works."""
    env = {"MPRECIPES_FAULT": fault}
    results = run_jobs(*ranks(tmp_path, "train", 2, steps=[1, 2, 3], env=env))
    rank = fault[-1] if "rank" in fault else "0"
    for number, result in enumerate(results):
        (error,) = result["value"]["errors"]
        assert (error["kind"], error["step"]) == ("CheckpointError", 2)
        assert error["found"].startswith(f"rank {rank if 'rank' in fault else number}: OSError")
        assert result["value"]["candidates"] == [3, 1]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000003"]
    assert all(verify_folder(tmp_path / "checkpoints" / name) == [] for name in names)


def test_a_rank_that_dies_in_a_save_publishes_nothing(tmp_path):
    """Rank 1 is killed with its file written: rank 0 is told, and the one before is found."""
    env = {"MPRECIPES_FAULT": "kill@save.after_file:2@rank1"}
    survivor, dead = run_jobs(*ranks(tmp_path, "train", 2, steps=[1, 2], env=env))
    assert dead == {"status": -signal.SIGKILL}
    (error,) = survivor["value"]["errors"]
    assert (error["kind"], error["step"]) == ("LostPeers", 2)
    assert error["found"].startswith("rank 0 lost the others: RuntimeError")
    found = run_jobs(*ranks(tmp_path, "resume", 2))
    assert [result["value"]["step"] for result in found] == [1, 1]
    assert found[0]["value"]["names"] == ["step-00000001"]
