# SPDX-License-Identifier: Apache-2.0
"""Softmax, normalisation and loss are FP32 under autocast, and torch is left as it was."""

import pytest
import torch
import torch.nn.functional as F

from mprecipes.compute import operators
from mprecipes.compute.operators import (
    HeldOperators,
    float_dtypes,
    hold_operators,
    measure_operator,
    narrow_part,
    under_autocast,
)
from mprecipes.compute.precision import MODES
from mprecipes.errors import ConfigError

CPU = torch.device("cpu")
BY_MODE = ["softmax", "log_softmax", "logsumexp", "layer_norm", "group_norm"]


@pytest.fixture
def held():
    found = HeldOperators(CPU, torch.bfloat16)
    yield found
    found.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_cpu_leaves_in_16_bit_the_mode_holds(dtype):
    """Before, during and after: 16 bit, FP32, 16 bit; torch's own rule for the loss is kept."""
    name = str(dtype).removeprefix("torch.")
    assert {measure_operator(operator, CPU, dtype) for operator in BY_MODE} == {name}
    found = HeldOperators(CPU, dtype)
    assert found.by_mode == BY_MODE and found.facts["cross_entropy"] == "autocast"
    assert {measure_operator(operator, CPU, dtype) for operator in found.facts} == {"float32"}
    found.close()
    assert {measure_operator(operator, CPU, dtype) for operator in BY_MODE} == {name}


def test_values_are_those_of_fp32_from_the_same_inputs(held):
    """Functional calls and modules, bit for bit; gradients come back in the dtype of the input."""
    x = torch.randn(4, 8).bfloat16().requires_grad_()
    norm = torch.nn.LayerNorm(8)
    for call in (lambda t: F.softmax(t, dim=-1), norm, lambda t: t.logsumexp(-1)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = call(x)
        assert found.dtype == torch.float32 and torch.equal(found, call(x.float()))
        (gradient,) = torch.autograd.grad(found.square().sum(), x)
        assert gradient.dtype == torch.bfloat16


def test_a_dtype_that_is_asked_for_by_name_is_made_of_fp32(held):
    """softmax(..., dtype=bfloat16) computes in FP32 and is rounded at its end."""
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = F.softmax(x, dim=-1, dtype=torch.bfloat16)
    assert torch.equal(found, F.softmax(x, dim=-1).bfloat16())


def test_16_bit_weights_of_a_norm_are_cast_up(held):
    """As an engine's working copies are; without autocast nothing is changed."""
    norm, x = torch.nn.LayerNorm(8).bfloat16(), torch.randn(4, 8).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    under_autocast(norm, CPU, torch.bfloat16)
    assert norm(x).dtype == torch.float32 and norm.forward.__name__ == "forward"


def test_graphs_compiled_without_the_rules_are_not_taken_from_the_disk():
    """The key of torch's caches has the operators in it, after the user's own, and loses them."""
    config = torch.compiler.config
    with config.patch(cache_key_tag="mine"):
        held = HeldOperators(CPU, torch.bfloat16)
        assert config.cache_key_tag == "mine fp32: " + ", ".join(BY_MODE)
        held.close()
        assert config.cache_key_tag == "mine"


def test_without_autocast_nothing_is_measured_or_held():
    """FP32 and TF32 have no 16-bit operators."""
    assert hold_operators(MODES["fp32"], CPU, is_main=True).facts == {}


def test_what_is_held_is_told_once_by_the_main_process(caplog):
    """The operators, the mode and the device, to who asks for it; other ranks are quiet."""
    caplog.set_level("INFO")
    hold_operators(MODES["fp16"], CPU, is_main=False).close()
    assert caplog.text == ""
    hold_operators(MODES["fp16"], CPU, is_main=True).close()
    assert "fp16 on cpu: autocast leaves softmax, log_softmax" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}  # nothing to be done


def test_a_rule_that_does_not_work_is_refused(monkeypatch):
    """Sabotage: a rule that casts nothing; and attention that adds up in 16 bit."""
    monkeypatch.setattr(operators, "_wide", lambda value: value)
    with pytest.raises(ConfigError) as caught:
        HeldOperators(CPU, torch.bfloat16)
    assert caught.value.found == "softmax under autocast computes in bfloat16"
    monkeypatch.undo()
    monkeypatch.setattr(operators, "_attention", lambda device, dtype: 0.9375)
    with pytest.raises(ConfigError, match="scaled_dot_product_attention"):
        HeldOperators(CPU, torch.bfloat16)
    assert measure_operator("layer_norm", CPU, torch.bfloat16) == "bfloat16"


def test_operations_are_told_by_name_and_dtype():
    """Backward counts too; a product, or FP32, is no violation."""
    assert narrow_part("native_layer_norm_backward", {"bfloat16", "float32"}) == "normalisation"
    assert narrow_part("_log_softmax", {"float16"}) == "softmax"
    assert narrow_part("_softmax", {"float32"}) is None and narrow_part("mm", {"float16"}) is None
    assert float_dtypes([torch.ones(1), torch.ones(1, dtype=torch.int64)]) == {"float32"}
