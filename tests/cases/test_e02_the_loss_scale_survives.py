# SPDX-License-Identifier: Apache-2.0
"""Case E02: the loss scale was not saved, or moved while it was loaded.

Reports: huggingface/transformers#34053, huggingface/transformers#11663,
huggingface/accelerate#4289.
"""

import json
import os
import signal

import pytest

from mprecipes.errors import Preempted
from tests.fix64 import options
from tests.inprocess import train
from tests.reading import journal, manifest

SCALES = [1024, 1024, 2048, 2048, 2048, 4096, 4096]  # after each of 7 steps
NUMERICS = {"initial_loss_scale": 1024, "loss_scale_growth_interval": 3}


@pytest.fixture(scope="module")
def cut(tmp_path_factory, fix64):
    """Seven FP16 steps, asked to stop in the second and launched again."""
    run = tmp_path_factory.mktemp("e02") / "run"
    words = options(
        fix64, run, precision="fp16", max_steps=7, save_steps=7, numerics=json.dumps(NUMERICS)
    )
    calls = []

    def stop_at_2(recipe):
        compute_loss = recipe.compute_loss

        def asked(model, batch):
            calls.append(1)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return compute_loss(model, batch)

        recipe.compute_loss = asked

    assert isinstance(train(words, stop_at_2).error, Preempted)
    assert train(words).error is None
    return run


def test_e02_scale_and_counter_are_in_the_checkpoint(cut):
    """After 2 good steps of 3: scale 1024, counter 2."""
    saved = manifest(cut, 2)["scaler"]
    assert (saved["scale"], saved["_growth_tracker"]) == (1024.0, 2)


def test_e02_the_next_step_grows_it(cut):
    """The sequence over seven steps is the published one, across the cut; the end is saved too."""
    lines = journal(cut)
    assert [line["loss_scale"] for line in lines.values()] == SCALES
    assert [line["attempt"] for line in lines.values()] == [0, 0, 1, 1, 1, 1, 1]
    assert not any(line["skipped"] for line in lines.values())
    saved = manifest(cut, 7)["scaler"]
    assert (saved["scale"], saved["_growth_tracker"]) == (4096.0, 1)
