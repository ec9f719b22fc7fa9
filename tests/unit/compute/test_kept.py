# SPDX-License-Identifier: Apache-2.0
"""Modules held in FP32 really compute in it."""

import pytest
import torch

from mprecipes.compute.kept import keep_in_fp32
from mprecipes.errors import ConfigError
from tests.toy_model import tiny_llama, tokens

CPU = torch.device("cpu")


def dtypes_of(model, patterns):
    """Runs a BF16 forward; gives the dtype that each Linear gave."""
    kept, found = keep_in_fp32(model, patterns, CPU), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(
                lambda _, __, output, name=name: found.update({name: output.dtype})
            )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=tokens()).logits.float().sum().backward()
    return kept, found


def test_the_modules_that_match_compute_in_fp32():
    """Only `down_proj` of both layers gives FP32 under BF16 autocast, and is verified."""
    kept, found = dtypes_of(tiny_llama(), ("*.down_proj",))
    wide = {name for name, dtype in found.items() if dtype == torch.float32}
    assert wide == {f"model.layers.{n}.mlp.down_proj" for n in (0, 1)} == set(kept.names)
    kept.verify()


def test_a_whole_layer_is_held_once():
    """A block matches as one module; its children are not wrapped again."""
    kept, found = dtypes_of(tiny_llama(), ("model.layers.1",))
    assert kept.names == ["model.layers.1"]
    assert found["model.layers.1.mlp.up_proj"] == torch.float32
    assert found["model.layers.0.mlp.up_proj"] == torch.bfloat16
    kept.verify()


def test_a_pattern_without_a_module_is_refused():
    """The nearest name is given."""
    with pytest.raises(ConfigError) as caught:
        keep_in_fp32(tiny_llama(), ("lm_haed",), CPU)
    error = caught.value
    assert error.found == "keep_in_fp32 'lm_haed' matches no module"
    assert "lm_head" in error.expected and "numerics" in error.where and "*" in error.action


def test_a_module_that_did_not_compute_in_fp32_is_refused():
    """Sabotage: a module that casts its result down, and one that is never called."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].forward = lambda x: x.bfloat16()
    kept = keep_in_fp32(model, ("0",), CPU)
    with pytest.raises(ConfigError, match="0 gave nothing: never called"):
        kept.verify()
    model(torch.ones(1, 2))
    with pytest.raises(ConfigError) as caught:
        kept.verify()
    assert caught.value.found == "0 gave bfloat16" and "float32" in caught.value.expected


def test_16_bit_copies_of_the_weights_are_cast_up_where_they_are_read():
    """A kept Linear of an engine's BF16 copies gives the FP32 product; gradients reach the copy."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    kept = keep_in_fp32(model, ("0",), CPU)
    model.bfloat16()
    x = torch.randn(2, 4)
    found, layer = model(x), model[0]
    assert torch.equal(found, x @ layer.weight.float().T + layer.bias.float())
    found.sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16 and "weight" not in layer.__dict__
    kept.verify()
