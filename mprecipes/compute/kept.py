# SPDX-License-Identifier: Apache-2.0
"""Modules that compute in FP32 whatever the mode: `keep_in_fp32`, and the proof that they do.

An engine that computes in 16-bit copies of the weights (FSDP2, ZeRO) still hands those out: they
are cast up where a kept module reads them, so that inputs, products and results are FP32.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from mprecipes.compute.float8 import matching
from mprecipes.errors import ConfigError
from mprecipes.identity.values import nearest_name


class KeptInFp32:
    """The modules that were held back, and the dtype each was seen to give.

    Attributes:
        names: of the modules, outermost only.
        seen: module name -> dtypes of the tensors it gave, such as "float32".
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.seen: dict[str, set[str]] = {}

    def verify(self) -> None:
        """Refuses a module that was meant to compute in FP32 and did not; call it after a step.

        Raises:
            ConfigError: naming the module, and what it gave.
        """
        for name in self.names:
            found = self.seen.get(name)
            if found != {"float32"}:
                raise ConfigError(
                    f"{name} gave {', '.join(sorted(found)) if found else 'nothing: never called'}",
                    expected="float32, by keep_in_fp32",
                    where="keep_in_fp32 in option numerics",
                    action="name a module that is called in each forward and gives its result as "
                    "it computed it",
                )


def keep_in_fp32(
    model: torch.nn.Module, patterns: tuple[str, ...], device: torch.device
) -> KeptInFp32:
    """In place: the modules whose names match compute without autocast, on FP32 inputs.

    Raises:
        ConfigError: a pattern matches no module.
    """
    kept = KeptInFp32()
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(matching(name, (pattern,)) for name in names):
            meant = nearest_name(pattern, names)
            raise ConfigError(
                f"keep_in_fp32 {pattern!r} matches no module",
                expected=f"a module such as {meant or names[0]}",
                where="keep_in_fp32 in option numerics",
                action="correct the pattern; * stands for any characters",
            )
    for name in names:
        if matching(name, patterns) and not matching(name.rpartition(".")[0], patterns):
            module = model.get_submodule(name)
            kept.names.append(name)
            for part in module.modules():
                part.forward = _with_wide_parameters(part)  # type: ignore[method-assign]
            module.forward = _in_fp32(module.forward, device.type, kept, name)  # type: ignore[method-assign]
    return kept


def _with_wide_parameters(module: torch.nn.Module) -> Callable[..., Any]:
    """Its forward, which finds FP32 in the place of each 16-bit parameter of its own."""
    forward = module.forward

    @functools.wraps(forward)
    def with_wide_parameters(*inputs: Any, **named: Any) -> Any:
        own = [(n, p) for n, p in module.named_parameters(recurse=False) if _is_narrow(p)]
        for name, parameter in own:
            module.__dict__[name] = parameter.float()  # read before the parameter itself
        try:
            return forward(*inputs, **named)
        finally:
            for name, _ in own:
                del module.__dict__[name]

    return with_wide_parameters


def _in_fp32(
    forward: Callable[..., Any], device_type: str, kept: KeptInFp32, name: str
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def in_fp32(*inputs: Any, **named: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            result = forward(*tree_map(_wide, inputs), **tree_map(_wide, named))
        if name not in kept.seen:
            dtypes: set[str] = set()
            kept.seen[name] = dtypes
            tree_map(lambda value: _note(value, dtypes), result)
        return result

    return in_fp32


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and _is_narrow(value) else value


def _is_narrow(value: torch.Tensor) -> bool:
    return value.dtype in (torch.float16, torch.bfloat16)


def _note(value: Any, dtypes: set[str]) -> None:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        dtypes.add(str(value.dtype).removeprefix("torch."))
