# SPDX-License-Identifier: Apache-2.0
"""Why a mode did not pass: tried again with one thing at a time in FP32, what helps most is named.

Tried are groups of modules, sums inside products, sums over processes and, for FP16, other scales.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from mprecipes.compute.operators import NARROW
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.precision import REDUCE_DTYPES, PrecisionMode

GROUPS = {"attention": "*attn*", "MLP": "*mlp*", "normalisation": "*norm*", "head": "*lm_head"}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# gives the worst cosine under a policy, computed inside a context
Compare = Callable[[NumericsPolicy, AbstractContextManager[Any]], float]


class WideSums(TorchDispatchMode):
    """Context in which every product of 16-bit operands adds up in FP32, forward and backward.

    Operands and result keep their dtypes: only the sum inside the product is another one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args[-1]  # the second factor
        is_product = func.overloadpacket.__name__ in _PRODUCTS
        if not is_product or not isinstance(given, torch.Tensor) or given.dtype not in NARROW:
            return func(*args, **(kwargs or {}))
        return func(*tree_map(_wide, args), **(kwargs or {})).to(given.dtype)


def find_cause(
    compare: Compare, modules: Iterable[str], mode: PrecisionMode, policy: NumericsPolicy,
    worst: float,
) -> str:  # fmt: skip
    """Gives what helped most, in words, or that nothing did.

    Args:
        modules: names of the model's.
        worst: cosine of the worst gradient as the mode is.
    """
    names = list(modules)
    tries: dict[str, tuple[NumericsPolicy, AbstractContextManager[Any]]] = {}
    for group, pattern in GROUPS.items():
        if any(pattern.strip("*") in name for name in names):
            kept = (*policy.keep_in_fp32, pattern)
            tries[f"{group} in FP32"] = (replace(policy, keep_in_fp32=kept), nullcontext())
    if mode.autocast != "no":
        tries["accumulation inside products in FP32"] = (policy, WideSums())
    if policy.reduce_dtype != "fp32":
        tries["reduce_dtype fp32"] = (replace(policy, reduce_dtype="fp32"), nullcontext())
    if mode.scaler is not None:
        which = "initial_loss_scale" if policy.loss_scale is None else "loss_scale"
        for factor in (256.0, 1 / 256):
            scale = getattr(policy, which) * factor
            changed = replace(policy, **{which: scale})
            tries[f"loss scale {scale:g}"] = (changed, nullcontext())
    best, most = "none of them helped", worst + 0.1 * (1 - worst)
    for what, (changed, context) in tries.items():
        cosine = compare(changed, context)
        if cosine > most:
            best, most = f"{what} helps: worst cosine {worst:.4f} -> {cosine:.4f}", cosine
    return best


def round_as_reduced(gradient: torch.Tensor, policy: NumericsPolicy) -> torch.Tensor:
    """Gives what a gradient is after it went between processes in `reduce_dtype`."""
    return gradient.to(getattr(torch, REDUCE_DTYPES[policy.reduce_dtype])).to(gradient.dtype)


def _wide(value: Any) -> Any:
    is_narrow = isinstance(value, torch.Tensor) and value.dtype in NARROW
    return value.float() if is_narrow else value
