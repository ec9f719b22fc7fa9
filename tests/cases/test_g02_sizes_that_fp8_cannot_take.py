# SPDX-License-Identifier: Apache-2.0
"""Case G02: layers with a size not divisible by 16 failed on the device at the first step.

Reports: pytorch/ao#1268, huggingface/accelerate#1188, pytorch/torchtitan#1200.
"""

import json

import torch

from mprecipes.errors import ConfigError
from tests.fix64 import MODEL, options
from tests.inprocess import train
from tests.reading import manifest


def words(data, run, **fields):
    model = {**MODEL, "num_attention_heads": 4, "num_key_value_heads": 4, **fields}
    rows = {"per_device_train_batch_size": 1, "max_steps": 2, "model_config": json.dumps(model)}
    return [*options(data, run, precision="fp8", **rows), "--allow_unvalidated_fp8"]


def test_g02_only_what_fits_is_converted(tmp_path, fix64, caplog):
    """Hidden 48, intermediate 100, an extra head of 17: the 48 x 48 projections alone are FP8."""

    def change(recipe):
        build_model = recipe.build_model

        def build(config):
            model = build_model(config)
            model.extra = torch.nn.Linear(48, 17)
            model.extra.requires_grad_(False)
            return model

        recipe.build_model = build

    done = train(words(fix64, tmp_path / "run", hidden_size=48, intermediate_size=100), change)
    assert done.error is None  # a micro-batch has 16 positions of which 15 enter the loss
    facts = manifest(tmp_path / "run", 2)["precision"]["fp8"]
    assert facts["converted"] == [
        f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"
    ]
    assert facts["skipped"]["model.layers.0.mlp.up_proj"] == "48 x 100: not multiples of 16"
    assert facts["skipped"]["extra"] == "48 x 17: not multiples of 16"
    assert facts["skipped"]["lm_head"] == "output head"
    for name in (*facts["converted"], *facts["skipped"]):
        assert name in caplog.text


def test_g02_a_model_without_such_a_layer_is_refused(tmp_path, fix64):
    """Hidden 40, intermediate 100: nothing fits, exit 2 before the first step."""
    done = train(words(fix64, tmp_path / "run", hidden_size=40, intermediate_size=100))
    assert isinstance(done.error, ConfigError) and done.error.exit_code == 2
    assert "no module can compute in FP8" in done.error.found
    assert not (tmp_path / "run" / "journal").exists()
