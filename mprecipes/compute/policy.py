# SPDX-License-Identifier: Apache-2.0
"""How a run's numbers are kept, watched and saved from failure: the option `numerics`.

In a config file:

    numerics: {numerics_steps: 50, on_numeric_failure: fallback, fp8_recipe: rowwise}
"""

import dataclasses
import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mprecipes.errors import ConfigError
from mprecipes.identity.section import read_section

_LISTS = ("keep_in_fp32", "fp8_skip")


class Options(Protocol):
    """What is used of a recipe's config."""

    @property
    def numerics(self) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class NumericsPolicy:
    """How a run's numbers are kept, watched and saved from failure.

    Attributes:
        numerics_steps: gradients, updates and amax are measured every so many steps; None is off.
        activation_maxima: also the largest activation of each block, at these steps.
        reduce_dtype: dtype in which gradients are summed over processes.
        keep_in_fp32: patterns (as in a shell) of module names that compute in FP32.
        pad_vocab_to_multiple_of: the product over the vocabulary has a multiple of this many
            columns; the vocabulary itself stays.
        on_numeric_failure: at a loss or gradient that is not finite, stop, leave that update out,
            or go down one rung (see `fallback`); FP16 always leaves an overflow out first.
        max_consecutive_skips: so many updates left out in a row are a failure.
        learning_rate_factor: of the fallback's rung that lowers the learning rate.
        loss_scale: of FP16, static; None is dynamic.
        initial_loss_scale: of FP16, dynamic.
        loss_scale_growth_factor, loss_scale_backoff_factor, loss_scale_growth_interval: the scale
            grows after so many steps without an overflow, and falls at one.
        loss_scale_floor: an overflow at this scale is a failure.
        loss_scale_hysteresis: overflows until the scale falls, counted anew when it grows.
        fp8_recipe: how torchao scales FP8.
        fp8_skip: patterns of Linear names that stay in BF16.
    """

    numerics_steps: int | None = 100
    activation_maxima: bool = False
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    keep_in_fp32: tuple[str, ...] = ()
    pad_vocab_to_multiple_of: int | None = None
    on_numeric_failure: Literal["stop", "skip", "fallback"] = "stop"
    max_consecutive_skips: int = 16
    learning_rate_factor: float = 0.5
    loss_scale: float | None = None
    initial_loss_scale: float = 65536.0
    loss_scale_growth_factor: float = 2.0
    loss_scale_backoff_factor: float = 0.5
    loss_scale_growth_interval: int = 2000
    loss_scale_floor: float = 1.0
    loss_scale_hysteresis: int = 1
    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "rowwise"
    fp8_skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("numerics_steps", "max_consecutive_skips", "loss_scale_growth_interval",
                     "loss_scale_hysteresis", "pad_vocab_to_multiple_of"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _refused(name, repr(value), "1 or more", "write 1 or more")
        for name in ("loss_scale", "initial_loss_scale", "loss_scale_floor"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise _refused(name, repr(value), "more than 0", "write a power of two")
        for name in ("loss_scale_backoff_factor", "learning_rate_factor"):
            value = getattr(self, name)
            if not 0 < value < 1:
                raise _refused(name, repr(value), "between 0 and 1", "write 0.5")
        if not self.loss_scale_growth_factor > 1:
            found = repr(self.loss_scale_growth_factor)
            raise _refused("loss_scale_growth_factor", found, "more than 1", "write 2.0")
        if self.loss_scale is None and self.initial_loss_scale < self.loss_scale_floor:
            raise _refused(
                "initial_loss_scale", f"{self.initial_loss_scale} below the floor",
                f"at least loss_scale_floor {self.loss_scale_floor}", "raise it",
            )  # fmt: skip


def numerics_policy(config: Options) -> NumericsPolicy:
    """Gives the policy that `numerics` of a config says.

    Raises:
        ConfigError: an unknown name, or a value that is not what its name takes.
    """
    asked = (config.numerics or {}).get("fp8_recipe")
    if (lacking := _not_offered(asked)) is not None:
        raise _refused(
            "fp8_recipe", repr(asked), "tensorwise, rowwise or rowwise_with_gw_hp, of torchao",
            f"write fp8_recipe: rowwise. {lacking}",
        )  # fmt: skip
    policy = read_section(NumericsPolicy, config.numerics, "numerics")
    once = {name: tuple(dict.fromkeys(getattr(policy, name))) for name in _LISTS}
    return dataclasses.replace(policy, **once)  # type: ignore[arg-type]


def _not_offered(fp8_recipe: object) -> str | None:
    """Gives why a kind of FP8 that exists elsewhere is not offered here; None for other words."""
    word = str(fp8_recipe).lower()
    if "transformer" in word or word in ("te", "delayed", "delayed_scaling"):
        is_installed = importlib.util.find_spec("transformer_engine") is not None
        return (
            f"Transformer Engine is {'installed' if is_installed else 'not installed'}, and not "
            "driven: its modules bring FP8 state of their own (histories of amax), of which no "
            "test here shows that it is saved and resumed bit-equal; that takes a CUDA device of "
            "capability 8.9+"
        )
    if word.startswith(("mx", "nvfp4")):
        return (
            "MXFP8 and NVFP4 take a CUDA device of capability 10.0+ and torchao's prototypes; no "
            "test here shows that a run in them is saved and resumed bit-equal"
        )
    return None


def _refused(name: str, found: str, expected: str, action: str) -> ConfigError:
    where = f"{name} in option numerics"
    return ConfigError(f"{name} is {found}", expected=expected, where=where, action=action)
