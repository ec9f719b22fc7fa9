# SPDX-License-Identifier: Apache-2.0
"""Case L08: a training that was over did not end, or one rank's error left the others for ever.

Reports: facebookresearch/fairseq#4619, huggingface/accelerate#3059, modelscope/ms-swift#7992.
"""

import json
import time

import psutil
import pytest

from tests.fix64 import RECIPE, options
from tests.launching import start
from tests.reading import attempt_lines, checkpoint_steps, outcomes

pytestmark = pytest.mark.launch
LIMIT_SECONDS = 30
# Everything that has a thread or a process of its own: saving, mirror, scrubber, loader workers.
BUSY = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2}
BUSY |= {"dataloader_num_workers": 1}


def ended(tmp_path, fix64, last_step, fault=None):
    """Launches; from the last step on all processes have 30 seconds. Gives run and exit code."""
    run = tmp_path / "run"
    policy = {"mirror": f"file://{tmp_path}/mirror", "verify_every_hours": 0.001}
    words = options(fix64, run, **BUSY, checkpoint=json.dumps(policy))
    env = {"MPRECIPES_FAULT": fault} if fault else {}
    journal = run / "journal" / "attempt-0000.jsonl"

    def made_it():
        return journal.exists() and [x["step"] for x in attempt_lines(run, 0)][-1:] == [last_step]

    with start(RECIPE, words, num_processes=2, env=env) as running:
        running.wait_until(made_it)
        processes, began = running.processes(), time.monotonic()
        done = running.finish(timeout=LIMIT_SECONDS)
        assert psutil.wait_procs(processes, timeout=5)[1] == []
        assert running.processes() == []
        assert time.monotonic() - began < LIMIT_SECONDS
    return run, done


def test_l08_a_normal_end(tmp_path, fix64):
    """Exit code 0; the last save is there, and at the mirror."""
    run, done = ended(tmp_path, fix64, 4)
    assert done.returncode == 0, done.output
    assert outcomes(run) == ["finished"]
    assert checkpoint_steps(run)[-1] == 4
    there = tmp_path / "mirror" / "run" / "checkpoints" / "step-00000004" / "manifest.json"
    assert there.exists()


@pytest.mark.parametrize("rank", [1, 0])
def test_l08_an_exception_on_one_rank(tmp_path, fix64, rank):
    """Another exit code; it is said which rank failed with what, and step 2 is whole."""
    run, done = ended(tmp_path, fix64, 3, f"eio@step:3@rank{rank}")
    assert done.returncode != 0
    assert "planted fault at step" in done.output
    assert outcomes(run) == ["crashed"]
    assert checkpoint_steps(run) == [2]
    if rank == 1:
        (failure,) = (run / "failures").glob("*.json")
        assert "planted fault at step" in json.loads(failure.read_text())["error"]
