# SPDX-License-Identifier: Apache-2.0
"""Runs the recipe's own `main()` in this process, on one process and a changed copy of its module.

    done = train(words, change=lambda recipe: ...)
    assert done.error is None

A launch costs seconds before its first step; here it costs none. Killing, several processes and the
launcher are left to `tests/launching.py`.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from mprecipes.errors import RecipeError
from tests.fix64 import RECIPE


@dataclass
class Trained:
    """What became of it.

    Attributes:
        error: that ended it, None when it finished.
        model: as the last `build_model` gave it.
    """

    error: RecipeError | None = None
    model: Any = None

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def load_recipe() -> ModuleType:
    """Gives a fresh copy of the recipe's module."""
    spec = importlib.util.spec_from_file_location("recipe_in_process", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe_in_process"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def train(words: Sequence[object], change: Callable[[ModuleType], None] | None = None) -> Trained:
    """Runs the recipe with a command line.

    Args:
        change: is given the module before it runs, to plant a fault in it.
    """
    from accelerate.state import AcceleratorState

    recipe, done = load_recipe(), Trained()
    if change is not None:
        change(recipe)
    build_model = recipe.build_model

    def build(config: Any) -> Any:
        done.model = build_model(config)
        return done.model

    recipe.build_model = build  # type: ignore[attr-defined]
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(RECIPE), *map(str, words)])
        patch.setenv("MPRECIPES_CPU_THREADS", "1")
        try:
            recipe.main()
        except RecipeError as error:
            done.error = error
        finally:
            torch.set_num_threads(threads)
            AcceleratorState._reset_state(reset_partial_state=True)
    return done


class Probing:
    """Whether the recipe is measuring a probe, whose forwards are no training.

    Args:
        recipe: its module; `measure` is wrapped.
    """

    def __init__(self, recipe: ModuleType) -> None:
        self.now, measure = False, recipe.measure

        def flagged(*args: Any) -> Any:
            self.now = True
            try:
                return measure(*args)
            finally:
                self.now = False

        recipe.measure = flagged  # type: ignore[attr-defined]


def with_gradient(factor: float, call: int) -> Callable[[ModuleType], None]:
    """Gives a change that multiplies the gradient, not the loss, of forward number `call`."""

    def change(recipe: ModuleType) -> None:
        compute_loss, calls, probing = recipe.compute_loss, [], Probing(recipe)

        def planted(model: Any, batch: Any) -> Any:
            loss = compute_loss(model, batch) * 1.0
            if probing.now:
                return loss
            calls.append(1)
            if len(calls) == call:
                loss.register_hook(lambda gradient: gradient * factor)
            return loss

        recipe.compute_loss = planted  # type: ignore[attr-defined]

    return change
