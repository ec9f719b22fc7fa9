# SPDX-License-Identifier: Apache-2.0
"""Runs the pretraining recipe with a fault that no precision mode of the product has.

Under accelerate launch; `MPRECIPES_PLANTED` names the faults, as `mprecipes compare` sets it for an
arm such as `bf16:masters=bf16`:

    masters=bf16     weights are rounded to BF16 after every update, as if there were no masters
    grad_accum=bf16  the gradient is rounded to BF16 after every micro-batch
    order=N          the samples of the order of seed + N

Weights and gradients stay FP32 tensors, so that the run begins with the digest all others have.
"""

import importlib.util
import os
import sys

import torch

import mprecipes as mp
from tests.fix64 import RECIPE


def main() -> None:
    spec = importlib.util.spec_from_file_location("recipe", RECIPE)
    recipe = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = recipe  # dataclasses look their module up
    spec.loader.exec_module(recipe)
    plant(recipe)
    with mp.exit_codes():
        recipe.main()


def plant(recipe):
    """Changes the recipe's module as the variable says."""
    words = filter(None, os.environ.get("MPRECIPES_PLANTED", "").split(","))
    for name, value in (word.split("=") for word in words):
        PLANTED[name](recipe, value)


def _masters(recipe, _value):
    build = recipe.build_optimizer

    def built(model, config):
        optimizer = build(model, config)
        optimizer.register_step_post_hook(lambda *_: _round(model.parameters()))
        return optimizer

    recipe.build_optimizer = built


@torch.no_grad()
def _round(parameters):
    for parameter in parameters:
        parameter.copy_(parameter.bfloat16())


def _grad_accum(recipe, _value):
    build = recipe.build_model

    def built(config):
        model = build(config)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_round_gradient)
        return model

    recipe.build_model = built


def _round_gradient(parameter):
    parameter.grad.copy_(parameter.grad.bfloat16())


def _order(recipe, value):
    order = mp.SampleOrder
    mp.SampleOrder = lambda count, seed: order(count, seed + int(value))


PLANTED = {"masters": _masters, "grad_accum": _grad_accum, "order": _order}

if __name__ == "__main__":
    main()
