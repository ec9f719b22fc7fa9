# SPDX-License-Identifier: Apache-2.0
"""Case H02: a save under ZeRO is made by all ranks, and one that fails on one rank hangs nobody.

Source: deepspeedai/DeepSpeed#2993, bghira/SimpleTuner#262, huggingface/accelerate#3709.
"""

import json

import pytest

from mprecipes.checkpoint.manifest import verify_folder
from tests.fix64 import RECIPE, options, write_rows
from tests.launching import launch
from tests.reading import checkpoint, checkpoint_steps

pytestmark = pytest.mark.launch


def train(folder, config, **env):
    policy = {"synchronous": True, "on_save_failure": "stop"}
    words = options(
        write_rows(folder / "rows.jsonl"), folder / "run", max_steps=6, save_steps=2,
        per_device_train_batch_size=2, checkpoint=json.dumps(policy),
    )  # fmt: skip
    config = f"accelerate_configs/{config}.yaml"
    return launch(RECIPE, words, config=config, num_processes=2, env=env, timeout=120)


def test_h02_three_saves_of_two_ranks_verify(tmp_path):
    """ZeRO-2, a save every 2 of 6 steps: done within 120 s, three checkpoints, every byte good."""
    done = train(tmp_path, "zero2_bf16")
    assert done.returncode == 0, done.output
    run = tmp_path / "run"
    assert checkpoint_steps(run) == [2, 4, 6]
    assert all(verify_folder(checkpoint(run, step)) == [] for step in (2, 4, 6))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["zero2_bf16", "zero3_bf16"])
def test_h02_one_rank_that_fails_in_a_save_ends_both(tmp_path, config):
    """Rank 1 cannot write step 4: rank 0 ends with its error, within the limit."""
    done = train(tmp_path, config, MPRECIPES_FAULT="eio@save.before_file:4@rank1")
    assert done.returncode != 0
    assert "rank 1: OSError" in done.output and "saving step 4" in done.output
    assert checkpoint_steps(tmp_path / "run") == [2]
