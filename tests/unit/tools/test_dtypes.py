# SPDX-License-Identifier: Apache-2.0
"""The audit sees in which dtype each operation really computed."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from mprecipes.compute.operators import HeldOperators
from mprecipes.tools.dtypes import audit_dtypes
from tests.toy_model import tiny_llama, tokens


def step(model):
    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=tokens()).logits
        F.cross_entropy(logits.float().flatten(0, 1), tokens().flatten()).backward()

    return run


def test_a_llama_keeps_softmax_norms_and_loss_in_fp32():
    """Products are BF16; casts are counted in both directions; nothing sensitive is 16 bit."""
    model = tiny_llama()
    audit = audit_dtypes(model, step(model))
    assert audit.violations == []
    assert any(kind == "bfloat16" and "mm" in op for _, op, kind in audit.rows)
    assert ("model.layers.0.input_layernorm", "rsqrt", "float32") in audit.rows
    assert audit.casts["float32 -> bfloat16"] > 10 and audit.casts["bfloat16 -> float32"] > 10
    assert json.dumps(audit.to_dict())


def test_a_softmax_in_16_bit_is_named():
    """Sabotage: a module whose softmax computes in BF16 is a violation with its name."""

    class Gate(torch.nn.Module):
        def forward(self, x):
            return x.bfloat16().softmax(dim=-1)

    model = torch.nn.Sequential(Gate())
    ones = torch.ones(2, 4, requires_grad=True)
    audit = audit_dtypes(model, lambda: model(ones).float().sum().backward())
    assert audit.violations[-1] == "0: softmax (_softmax) in bfloat16"


SMALL = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 16}  # fmt: skip
MODELS = {
    "gpt2": {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16,
             "bos_token_id": 0, "eos_token_id": 0},
    "llama": SMALL, "gpt_neox": SMALL, "phi": {**SMALL, "qk_layernorm": True}, "bert": SMALL,
}  # fmt: skip
NARROW = {  # what autocast alone leaves in 16 bit, in two layers
    "phi": {f"model.layers.{n}.self_attn.{x}_layernorm" for n in (0, 1) for x in "qk"},
    "bert": {"cls.predictions.transform.LayerNorm"}
    | {f"bert.encoder.layer.{n}.attention.self" for n in (0, 1)},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", MODELS)
def test_what_autocast_leaves_in_16_bit_the_mode_computes_in_fp32(kind, dtype):
    """The places before, none after, eager attention; a model that had none is as it was."""
    torch.manual_seed(0)
    make = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    config = AutoConfig.for_model(kind, **MODELS[kind])
    model = make.from_config(config, attn_implementation="eager").float().eval()

    def run():
        model.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            logits = model(input_ids=tokens()).logits
        found.append(F.cross_entropy(logits.float().flatten(0, 1), tokens().flatten()))
        found[-1].backward()

    found = []
    before = audit_dtypes(model, run)
    places = {line.partition(":")[0] for line in before.violations} - {"(backward)"}
    assert places == NARROW.get(kind, set())
    held = HeldOperators(torch.device("cpu"), dtype)
    try:
        after = audit_dtypes(model, run)
    finally:
        held.close()
    assert after.violations == []
    if kind in NARROW:
        assert found[0].item() == pytest.approx(found[1].item(), rel=2e-3)
    else:
        assert torch.equal(found[0], found[1]) and before.rows == after.rows
