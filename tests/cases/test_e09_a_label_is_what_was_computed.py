# SPDX-License-Identifier: Apache-2.0
"""Case E09: a run labelled FP16 was really FP32.

Measured on accelerate 1.15.0; cf. Lightning-AI/pytorch-lightning#21815, bytedance/Protenix#258.
"""

import pytest
import torch

from tests.fix64 import options
from tests.inprocess import train
from tests.reading import journal, manifest

EXPECTED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
            "fp8": torch.bfloat16}  # fmt: skip


@pytest.mark.parametrize("precision", EXPECTED)
def test_e09_products_inside_the_step_have_the_dtype_of_the_label(tmp_path, fix64, precision):
    """Each Linear gives the mode's dtype; FP16 has a scaler, FP8 its modules; the manifest says."""
    seen = set()

    def change(recipe):
        build_model = recipe.build_model

        def build(config):
            model = build_model(config)
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
            return model

        recipe.build_model = build

    run = tmp_path / "run"
    words = options(fix64, run, precision=precision, max_steps=2)
    assert train([*words, "--allow_unvalidated_fp8"], change).error is None
    assert seen == {EXPECTED[precision]}
    facts = manifest(run, 2)["precision"]
    assert facts["mode"] == precision
    assert facts["compute_dtype"] == str(EXPECTED[precision]).removeprefix("torch.")
    assert (manifest(run, 2)["scaler"] is not None) == (precision == "fp16")
    assert (journal(run)[1]["loss_scale"] is not None) == (precision == "fp16")
    assert len(facts.get("fp8", {}).get("converted", ())) == (14 if precision == "fp8" else 0)
