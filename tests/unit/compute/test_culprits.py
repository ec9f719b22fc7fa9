# SPDX-License-Identifier: Apache-2.0
"""The first layer whose numbers were not finite is named."""

import pytest
import torch

from mprecipes.compute.culprits import BlockWatch, GradientNorms, clean_name, name_culprits
from mprecipes.compute.ranks import Ranks
from tests.toy_model import tiny_llama, tokens

PLACES = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"]


def culprit(model, plant):
    """Runs forward and backward with a planted fault, and clips as recipes do."""
    blocks, norms = BlockWatch(model), GradientNorms(model)
    plant(model)
    model(input_ids=tokens()).logits.float().square().mean().backward()
    norms.take()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # makes every gradient NaN
    return name_culprits(Ranks(), blocks, norms)


@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_that_overflows_is_named_by_its_layer(place):
    """Infinity planted in the gradient of one module's output; all before it are bad too."""

    def plant(model):
        module = model.get_submodule(place)
        module.register_forward_hook(
            lambda _, __, output: output.register_hook(lambda g: g * float("inf")) and None
        )

    name, modules = culprit(tiny_llama(tie_word_embeddings=False), plant)
    assert name == modules[0] == place


@pytest.mark.parametrize("layer", [0, 1])
def test_an_activation_that_overflows_is_named_by_its_block(layer):
    """Infinity planted in a block's MLP: that block is named, not the ones after it."""

    def plant(model):
        module = model.get_submodule(f"model.layers.{layer}.mlp.up_proj")
        module.register_forward_hook(lambda _, __, output: output * float("inf"))

    name, modules = culprit(tiny_llama(), plant)
    assert name == f"the output of model.layers.{layer}" and modules == [f"model.layers.{layer}"]


def test_where_nothing_is_bad_nothing_is_named():
    """A clean step has no culprit, and its norms are those of torch."""
    model = tiny_llama()
    blocks, norms = BlockWatch(model), GradientNorms(model)
    model(input_ids=tokens()).logits.float().square().mean().backward()
    norms.take()
    assert name_culprits(Ranks(), blocks, norms) == ("an unknown place", [])
    expected = {n: p.grad.norm().item() for n, p in model.named_parameters()}
    assert norms.by_name() == pytest.approx(expected)
    blocks.clear()
    assert blocks.first_bad() is None
    assert blocks.calls[0] == "model.embed_tokens" and blocks.calls[-1] == "lm_head"


def test_a_compiled_model_is_left_alone():
    """Hooks would break its graph into pieces: gradients name the layer there."""
    model = tiny_llama()
    model.compile()
    assert BlockWatch(model).names == []
    assert clean_name("module._orig_mod.model.layers.0") == "model.layers.0"
