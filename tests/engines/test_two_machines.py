# SPDX-License-Identifier: Apache-2.0
"""Two launchers on loopback as two machines: one run, killed and continued bit-equal.

The README's multi-node commands are the same files with `--num_machines`, `--machine_rank` and
`--main_process_ip`.
"""

import contextlib
import os
import re
import sys
from pathlib import Path

import pytest

from tests.engines.machines import free_port, launch_machines
from tests.fix64 import RECIPE, ROOT, options
from tests.launching import Running, environment
from tests.reading import assert_released, assert_same_run, manifest, outcomes, resume_report

pytestmark = pytest.mark.launch


def words(rows, run, **changed):
    values = {"per_device_train_batch_size": 2, "global_batch_size": 8, "max_steps": 8}
    return options(rows, run, **{**values, "save_steps": 3, "precision": "bf16", **changed})


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp2_bf16", "zero2_bf16"])
def test_a_shared_folder_passes_the_drill(rows, tmp_path, config):
    """Both machines are killed after step 5; the same two commands go on, bit-equal to the end."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for done in launch_machines([config] * 2, [words(rows, whole)] * 2):
        assert done.returncode == 0, done.output
    kill = {"MPRECIPES_FAULT": "kill@step:5"}
    for done in launch_machines([config] * 2, [words(rows, cut)] * 2, env=kill):
        assert done.returncode != 0, done.output
    for done in launch_machines([config] * 2, [words(rows, cut)] * 2):
        assert done.returncode == 0, done.output
    assert outcomes(cut) == ["killed", "finished"]
    assert_released(resume_report(cut, 1))
    assert resume_report(cut, 1)["replayed_steps"] == 2
    assert_same_run(whole, cut)
    topology = manifest(cut, 8)["topology"]
    assert (topology["world_size"], topology["local_world_size"]) == (2, 1)


def test_folders_of_their_own_are_refused(rows, tmp_path):
    """A disk of each machine's own is told at start, not at the first save."""
    lines = [words(rows, tmp_path / name) for name in ("first", "second")]
    for done in launch_machines(["cpu_bf16"] * 2, lines):
        output = re.sub(r"\s+", " ", done.output)
        assert "the run folder of rank 0 is not the one that rank 1 sees" in output, done.output
        assert "expected: one folder on a disk that all machines share" in output
        assert done.returncode != 0


def test_torchrun_and_its_rendezvous(rows, tmp_path):
    """docs/torchrun.sh, the same command on both machines: which is rank 0 they find out."""
    run = tmp_path / "run"
    line = words(rows, run, max_steps=4)
    place = line.index("--output_dir")
    del line[place : place + 2]
    env = {"NODES": "2", "PROCESSES_PER_NODE": "1", "RECIPE": str(RECIPE)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = ["bash", str(ROOT / "docs" / "torchrun.sh"), f"127.0.0.1:{free_port()}", str(run)]
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(Running([*script, *line], environment(env), ROOT)) for _ in range(2)
        ]
        for done in [each.finish(timeout=150) for each in running]:
            assert done.returncode == 0, done.output
    assert outcomes(run) == ["finished"]
    topology = manifest(run, 4)["topology"]
    assert (topology["world_size"], topology["local_world_size"]) == (2, 1)
    assert topology["backend"] == "gloo"
