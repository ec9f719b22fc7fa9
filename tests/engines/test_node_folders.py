# SPDX-License-Identifier: Apache-2.0
"""Two launchers on loopback as two machines, each with a run folder on a disk of its own."""

import json
import re
import shutil

import pytest

from tests.engines.machines import launch_machines
from tests.fix64 import options
from tests.launching import run_command
from tests.reading import (
    assert_released,
    assert_same_run,
    checkpoint,
    checkpoint_steps,
    journal,
    outcomes,
    quarantined,
    resume_report,
    run_json,
)

pytestmark = pytest.mark.launch
LOCAL = json.dumps({"synchronous": True, "on_each_node": True})
KILL = {"MPRECIPES_FAULT": "kill@step:5"}


def launch(rows, config, folder, *, env=None, **changed):
    """Launches 8 steps, saved every 3; gives the two folders and what both said, in one line."""
    runs = [folder / "node0" / "run", folder / "node1" / "run"]
    values = {"per_device_train_batch_size": 2, "global_batch_size": 8, "max_steps": 8}
    values |= {"save_steps": 3, "precision": "bf16", "checkpoint": LOCAL, **changed}
    words = [options(rows, run, **values) for run in runs]
    done = launch_machines([config] * 2, words, env=env, timeout=280)
    return runs, done, [re.sub(r"\s+", " ", each.output) for each in done]


def succeeded(done):
    for each in done:
        assert each.returncode == 0, each.output


def same_files(one, other):
    """Whether two checkpoints are the same bytes under the same names."""
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    """Gives the folder of a run that was never cut, launched once for each config."""
    made = {}

    def whole(config):
        if config not in made:
            runs, done, _ = launch(rows, config, tmp_path_factory.mktemp("whole"))
            succeeded(done)
            made[config] = runs[0]
        return made[config]

    return whole


def check(rows, tmp_path, uncut, config, emptied):
    """Killed after step 5; a disk is emptied; the same commands go on, bit-equal to the end."""
    runs, done, _ = launch(rows, config, tmp_path / "cut", env=KILL)
    for run, each in zip(runs, done, strict=True):
        assert each.returncode != 0, each.output
        assert checkpoint_steps(run) == [3]
        assert list(journal(run)) == [1, 2, 3, 4, 5]
        done_sums = run_command(["sh", "-c", "sha256sum -c SHA256SUMS"], cwd=checkpoint(run, 3))
        assert done_sums.returncode == 0, done_sums.output
        verified = run_command(["mprecipes", "verify", run, "--all"])
        assert verified.returncode == 0, verified.output
    assert same_files(checkpoint(runs[0], 3), checkpoint(runs[1], 3))
    files = json.loads((checkpoint(runs[0], 3) / "manifest.json").read_text())["files"]
    assert {entry["rank"] for entry in files} == {0, 1}
    if emptied is not None:
        shutil.rmtree(runs[emptied].parent)
    runs, done, said = launch(rows, config, tmp_path / "cut")
    succeeded(done)
    if emptied is not None:
        told = f"the node of rank {emptied} lacked "
        sent = (
            f"step-00000003 was missing on the node of rank {emptied}: sent by rank {1 - emptied}"
        )
        assert told in said[emptied] and sent in said[emptied], done[emptied].output
    assert run_json(runs[0])["run_id"] == run_json(runs[1])["run_id"]
    assert same_files(checkpoint(runs[0], 8), checkpoint(runs[1], 8))
    for run in runs:
        assert outcomes(run) == ["killed", "finished"]
        assert_released(resume_report(run, 1))
        assert resume_report(run, 1)["replayed_steps"] == 2
        assert (run / "milestones" / "pretrain-end" / "manifest.json").exists()
        assert_same_run(uncut, run)


def test_a_machine_that_lost_its_disk_is_sent_the_run(rows, tmp_path, whole):
    """DDP, the machine of rank 0: records and checkpoint come from the other, to the last bit."""
    check(rows, tmp_path, whole("cpu_bf16"), "cpu_bf16", 0)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["cpu_bf16", "fsdp2_bf16", "zero2_bf16", "zero3_bf16"])
@pytest.mark.parametrize("emptied", [None, 0, 1])
def test_every_engine_and_disk(rows, tmp_path, whole, config, emptied):
    """Sharded state too: each node holds all fragments."""
    check(rows, tmp_path, whole(config), config, emptied)


@pytest.mark.slow
def test_a_damaged_copy_is_replaced_by_a_good_one(rows, tmp_path):
    """One flipped bit on one node costs no step: it goes to quarantine there, the other sends."""
    runs, _, _ = launch(rows, "fsdp2_bf16", tmp_path, env=KILL)
    (file,) = checkpoint(runs[1], 3).glob("tensors-rank00000-000.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    runs, done, said = launch(rows, "fsdp2_bf16", tmp_path)
    succeeded(done)
    assert "step-00000003 was missing on the node of rank 1: sent by rank 0" in said[1]
    assert (quarantined(runs[0]), len(quarantined(runs[1]))) == ([], 2)
    report = resume_report(runs[0], 1)
    assert (report["step"], report["verdict"]) == (3, "released_with_warnings")
    (check_of_bytes,) = (each for each in report["checks"] if each["name"] == "bytes")
    assert "step-00000003 on the node of rank 1" in str(check_of_bytes["found"]["quarantined"])


def test_a_folder_that_both_see_is_refused(rows, tmp_path):
    """`on_each_node` with a shared folder is told before anything is written there."""
    run = tmp_path / "run"
    words = options(rows, run, per_device_train_batch_size=2, checkpoint=LOCAL)
    for done in launch_machines(["cpu"] * 2, [words, words]):
        output = re.sub(r"\s+", " ", done.output)
        assert "the nodes of ranks 0, 1 see the same folder" in output, done.output
        assert "expected: a folder of each node's own, as `on_each_node`" in output
        assert done.returncode != 0
    assert list(run.iterdir()) == []
