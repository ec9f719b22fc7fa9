# SPDX-License-Identifier: Apache-2.0
"""Case F09: the exported model had another dtype than asked.

Reports: benchflow-ai/posttrainarena#9, areal-project/AReaL#1369.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mprecipes.checkpoint.export import export_checkpoint
from tests.fix64 import options
from tests.inprocess import train
from tests.reading import checkpoint, tensors
from tests.toy_model import tokens

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, fix64):
    """Three steps in FP8, whose modules are not plain Linear; the model, and its run."""
    run = tmp_path_factory.mktemp("f09") / "run"
    done = train([*options(fix64, run, precision="fp8", max_steps=3), "--allow_unvalidated_fp8"])
    assert done.error is None
    return done.model, run


@pytest.mark.parametrize("dtype", DTYPES)
def test_f09_every_tensor_and_the_config_say_it(trained, tmp_path, dtype):
    """All tensors have the dtype, config.json says the same, and the checkpoint keeps FP32."""
    _, run = trained
    out = export_checkpoint(checkpoint(run, 3), tmp_path / "out", dtype=dtype)
    found = {value.dtype for value in load_file(out / "model.safetensors").values()}
    assert found == {DTYPES[dtype]}
    said = json.loads((out / "config.json").read_text())
    assert said["dtype"] == str(DTYPES[dtype]).removeprefix("torch.")
    weights = {n: t for n, t in tensors(run, 3).items() if n.startswith("weights/")}
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_f09_the_fp32_export_computes_bit_for_bit_what_was_trained(trained):
    """The run's own export, loaded, gives the logits of the trained weights in FP32."""
    model, run = trained
    exported = AutoModelForCausalLM.from_pretrained(run / "model", dtype="auto").eval()
    plain = AutoModelForCausalLM.from_config(model.config).float().eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(exported(tokens()).logits, plain(tokens()).logits)
