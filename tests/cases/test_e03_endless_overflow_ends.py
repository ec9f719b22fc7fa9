# SPDX-License-Identifier: Apache-2.0
"""Case E03: every step overflowed, the scale fell below 1, and training learned nothing for hours.

Reports: deepspeedai/DeepSpeed#697, deepspeedai/DeepSpeed#5426, deepspeedai/DeepSpeedExamples#418.
"""

import torch

from mprecipes.errors import NumericsError
from tests.fix64 import options
from tests.inprocess import train
from tests.reading import checkpoint_steps, journal, run_json


def test_e03_a_loss_times_1e30_ends_the_run(tmp_path, fix64, capsys):
    """Exit 5 within 17 steps, parameters unchanged, no checkpoint, and a diagnosis."""
    initial = {}

    def change(recipe):
        compute_loss, build_model = recipe.compute_loss, recipe.build_model

        def build(config):
            model = build_model(config)
            initial.update({name: p.detach().clone() for name, p in model.named_parameters()})
            return model

        recipe.build_model = build
        recipe.compute_loss = lambda model, batch: compute_loss(model, batch) * 1e30

    words = options(fix64, tmp_path / "run", precision="fp16", max_steps=40, save_steps=1)
    done = train(words, change)
    error = done.error
    assert isinstance(error, NumericsError) and error.exit_code == 5
    for name, parameter in done.parameters().items():
        assert torch.equal(parameter, initial[name]), name
    run = tmp_path / "run"
    assert len(journal(run)) <= 16 and all(line["skipped"] for line in journal(run).values())
    assert checkpoint_steps(run) == []
    (attempt,) = run_json(run)["attempts"]
    assert (attempt["outcome"], attempt["exit_code"]) == ("numerics", 5)
    assert "steps in a row were skipped" in error.found and "at loss scale" in error.found
    assert "first in model." in error.found and "precision fp16" in error.where
    assert "--precision bf16" in error.action
    assert "loss scale 65536 -> 32768, step 1 skipped (overflow in " in capsys.readouterr().out


def test_e03_a_scale_that_begins_far_too_high_settles(tmp_path, fix64):
    """From 2^30 within 30 steps; each skip halves once, and none comes after a good step."""
    words = options(fix64, tmp_path / "run", precision="fp16", max_steps=30, save_steps=30,
                    numerics='{"initial_loss_scale": 1073741824}')  # fmt: skip
    assert train(words).error is None
    lines = list(journal(tmp_path / "run").values())
    skips = sum(line["skipped"] for line in lines)
    assert 0 < skips < 16
    assert [line["skipped"] for line in lines] == [True] * skips + [False] * (30 - skips)
    scales = [line["loss_scale"] for line in lines[:skips]]
    assert scales == [2.0 ** (29 - n) for n in range(skips)]
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[-1]["updates"] == 30 - skips
