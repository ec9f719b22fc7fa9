# SPDX-License-Identifier: Apache-2.0
"""FP8 through torchao: which Linear modules compute in it, which do not, and why.

Weights stay the FP32 parameters they were, under the same names: a checkpoint of an FP8 run loads
into any other mode. Where the device has no FP8 products they are emulated: the operands are
rounded to FP8, the product is made of them in higher precision.
"""

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import Any

import torch

from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.vocabulary import output_head
from mprecipes.errors import ConfigError

MULTIPLE = 16  # FP8 products on NVIDIA hardware take no other sizes


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What became of each module.

    Attributes:
        converted: names of modules that compute in FP8, in the model's order.
        skipped: module name -> why it does not.
    """

    recipe: str
    emulated: bool
    converted: tuple[str, ...]
    skipped: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "converted": list(self.converted)}


def plan_float8(model: torch.nn.Module, policy: NumericsPolicy) -> dict[str, str | None]:
    """Gives for every Linear and Embedding None, or the reason why it stays out of FP8."""
    head = output_head(model)
    found: dict[str, str | None] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding):
            found[name] = "embedding"
        elif isinstance(module, torch.nn.Linear):
            found[name] = _reason(name, module, policy, is_head=module is head)
    return found


def _reason(
    name: str, module: torch.nn.Linear, policy: NumericsPolicy, *, is_head: bool
) -> str | None:
    if is_head or name.rpartition(".")[2].endswith("head"):
        return "output head"
    if pattern := matching(name, policy.keep_in_fp32):
        return f"keep_in_fp32 {pattern!r}"
    if pattern := matching(name, policy.fp8_skip):
        return f"fp8_skip {pattern!r}"
    sizes = (module.in_features, module.out_features)
    if any(size % MULTIPLE for size in sizes):
        return f"{sizes[0]} x {sizes[1]}: not multiples of {MULTIPLE}"
    return None


def matching(name: str, patterns: Sequence[str]) -> str | None:
    """Gives the first pattern that a module's name, or a module it lies in, matches."""
    parts = name.split(".")
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1)):
            return pattern
    return None


def convert_to_float8(
    model: torch.nn.Module, policy: NumericsPolicy, device: torch.device
) -> Conversion:
    """In place: puts torchao's Float8Linear where `plan_float8` says so; parameters stay the same.

    On a CPU the input of each is first cast as autocast would, which torchao does on CUDA only
    (0.18, float8_linear.py: `torch.is_autocast_enabled()` without a device).

    Raises:
        ConfigError: no module is left to compute in FP8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    plan = plan_float8(model, policy)
    converted = tuple(name for name, reason in plan.items() if reason is None)
    skipped = {name: reason for name, reason in plan.items() if reason is not None}
    if not converted:
        listed = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:4])
        raise ConfigError(
            f"no module can compute in FP8 ({listed or 'the model has no Linear'})",
            expected=f"at least one Linear whose sizes are multiples of {MULTIPLE}",
            where="precision fp8",
            action="choose sizes in model_config that are multiples of 16, or --precision bf16",
        )
    emulated = device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)
    config = Float8LinearConfig.from_recipe_name(policy.fp8_recipe)
    convert_to_float8_training(
        model,
        module_filter_fn=lambda _, name: name in converted,
        # pad_inner_dim: a micro-batch may hold any number of tokens
        config=dataclasses.replace(config, emulate=emulated, pad_inner_dim=True),
    )
    for name in converted:
        module = model.get_submodule(name)
        assert isinstance(module, Float8Linear), name
        if device.type == "cpu":
            module.register_forward_pre_hook(_cast_as_autocast)
    return Conversion(policy.fp8_recipe, emulated, converted, skipped)


def count_float8(model: torch.nn.Module) -> int:
    """Gives how many modules compute in FP8 now."""
    from torchao.float8.float8_linear import Float8Linear

    return sum(isinstance(module, Float8Linear) for module in model.modules())


def _cast_as_autocast(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    if torch.is_autocast_enabled("cpu"):
        return (inputs[0].to(torch.get_autocast_dtype("cpu")), *inputs[1:])
    return inputs
