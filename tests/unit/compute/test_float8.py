# SPDX-License-Identifier: Apache-2.0
"""Which modules compute in FP8, which do not, and that weights stay what they were."""

import pytest
import torch

from mprecipes.compute.float8 import convert_to_float8, count_float8, matching, plan_float8
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.errors import ConfigError
from tests.toy_model import tiny_llama, tokens

CPU = torch.device("cpu")
NUM_LINEAR = 14  # 7 in each of 2 layers, without the head


def test_every_module_has_a_verdict():
    """Of the tiny Llama all Linear but the head are converted; the reason of the rest is named."""
    plan = plan_float8(tiny_llama(tie_word_embeddings=False), NumericsPolicy())
    skipped = {name: reason for name, reason in plan.items() if reason is not None}
    assert skipped == {"model.embed_tokens": "embedding", "lm_head": "output head"}
    assert len(plan) == NUM_LINEAR + 2


def test_patterns_hold_modules_back():
    """A pattern of a whole layer holds back all in it; the reason says which pattern it was."""
    policy = NumericsPolicy(fp8_skip=("model.layers.0",), keep_in_fp32=("*.down_proj",))
    plan = plan_float8(tiny_llama(), policy)
    assert plan["model.layers.0.mlp.up_proj"] == "fp8_skip 'model.layers.0'"
    assert plan["model.layers.1.mlp.down_proj"] == "keep_in_fp32 '*.down_proj'"
    assert plan["model.layers.1.mlp.up_proj"] is None


def test_a_pattern_matches_a_name_or_what_it_lies_in():
    """`layers.0` is in `layers.0.mlp`, not in `layers.01`."""
    assert matching("layers.0.mlp", ("x", "layers.0")) == "layers.0"
    assert matching("layers.01.mlp", ("layers.0",)) is None
    assert matching("layers.0.mlp", ("*.mlp",)) == "*.mlp"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_each_recipe_trains_under_autocast_with_the_same_weights(recipe):
    """Forward, backward and FP32 gradients; parameters, names and values are the plain model's."""
    plain, model = tiny_llama(), tiny_llama()
    before = dict(model.named_parameters())
    done = convert_to_float8(model, NumericsPolicy(fp8_recipe=recipe), CPU)
    assert (len(done.converted), count_float8(model)) == (NUM_LINEAR, NUM_LINEAR)
    assert done.emulated and done.recipe == recipe
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in after)
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=tokens()).logits
        expected = plain(input_ids=tokens()).logits
    logits.float().square().mean().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    error = ((logits - expected).norm() / expected.norm()).item()
    assert 0.001 < error < 0.2  # FP8 rounding, and nothing worse


def test_any_number_of_tokens_is_computed():
    """A micro-batch of 7 tokens, no multiple of 16 (case G02)."""
    model = tiny_llama()
    convert_to_float8(model, NumericsPolicy(), CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=tokens(1, 7)).logits.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_cpu_rounds_from_bf16_as_a_gpu_does():
    """Under autocast the input of a converted module is BF16 before it is rounded to FP8."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
    convert_to_float8(model, NumericsPolicy(), CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.ones(2, 16)).dtype == torch.bfloat16
    assert model(torch.ones(2, 16)).dtype == torch.float32


def test_a_model_with_nothing_to_convert_is_refused():
    """An FP8 run without one FP8 module would be BF16 under another name."""
    model = tiny_llama(hidden_size=40, intermediate_size=100, num_attention_heads=5,
                       num_key_value_heads=5)  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        convert_to_float8(model, NumericsPolicy(), CPU)
    error = caught.value
    assert "40 x 40: not multiples of 16" in error.found and "at least one" in error.expected
    assert error.where == "precision fp8" and "model_config" in error.action
