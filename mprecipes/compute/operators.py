# SPDX-License-Identifier: Apache-2.0
"""Softmax, normalisation and loss compute in FP32 in every mode, on every device, by measurement.

These operators add up many terms, which 16 bit does badly. torch's autocast computes them in FP32
on CUDA; on a CPU it knows the loss alone. Each is measured as it runs under autocast, with 16-bit
inputs; where one computes in 16 bit the mode gives autocast the rule that CUDA has (inputs are cast
up, the result is FP32), and it is measured again. It holds for modules and functional calls alike.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mprecipes.compute.precision import PrecisionMode
from mprecipes.errors import ConfigError

log = logging.getLogger(__name__)

SENSITIVE = {  # part of an operation's name -> what it is
    "softmax": "softmax", "layer_norm": "normalisation", "rms_norm": "normalisation",
    "group_norm": "normalisation", "rsqrt": "normalisation", "nll_loss": "loss",
    "cross_entropy": "loss", "logsumexp": "softmax",
}  # fmt: skip
NARROW = (torch.float16, torch.bfloat16)
_SIZE = 8
_KEYS = 4096  # more equal terms than a sum in 16 bit can count

# name -> operator of aten, and a call of it with a 16-bit tensor of 8 x 8
_OPERATORS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": ("softmax.int", lambda x: x.softmax(-1)),
    "log_softmax": ("log_softmax.int", lambda x: x.log_softmax(-1)),
    "logsumexp": ("logsumexp", lambda x: x.logsumexp(-1)),
    "layer_norm": ("layer_norm", lambda x: F.layer_norm(x, (_SIZE,), x[0], x[1])),
    "group_norm": ("group_norm", lambda x: F.group_norm(x, 2)),
    "rms_norm": ("rms_norm", lambda x: F.rms_norm(x, (_SIZE,), x[0])),
    "cross_entropy": (
        "cross_entropy_loss", lambda x: F.cross_entropy(x, torch.arange(_SIZE, device=x.device))
    ),
}  # fmt: skip


class HeldOperators:
    """The operators of one device, held in FP32 under autocast until `close`.

    Args:
        device: that computes.
        dtype: of autocast; None without autocast, and nothing is measured or changed.

    Attributes:
        facts: operator -> "autocast" where torch computes it in FP32 by itself, else "mode".

    Raises:
        ConfigError: an operator computes in 16 bit all the same.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self.facts: dict[str, str] = {}
        self._library: torch.library.Library | None = None
        self._tag = torch.compiler.config.cache_key_tag  # of the user
        if dtype is None:
            return
        key = f"Autocast{device.type.upper()}"
        for name, (operator, _) in _OPERATORS.items():
            self.facts[name] = "autocast"
            if measure_operator(name, device, dtype) == "float32":
                continue
            # The registration lives as long as this object; nothing is registered on a device
            # whose autocast knows the operator.
            self._library = self._library or torch.library.Library("aten", "IMPL")
            self._library.impl(operator, _in_fp32(operator, device.type), key)
            self.facts[name] = "mode"
            if (found := measure_operator(name, device, dtype)) != "float32":
                self.close()
                raise _still_narrow(name, found)
        if self._library is not None:  # a compiled graph on disk may be one without the rules
            torch.compiler.config.cache_key_tag += " fp32: " + ", ".join(self.by_mode)
        if (share := _attention(device, dtype)) != 0.5:
            self.close()
            raise _still_narrow("scaled_dot_product_attention", f"a sum that gives {share}")

    @property
    def by_mode(self) -> list[str]:
        """The operators that autocast alone would compute in 16 bit."""
        return [name for name, holder in self.facts.items() if holder == "mode"]

    def close(self) -> None:
        """Leaves autocast as torch made it."""
        if self._library is not None:
            self._library = None  # its end takes its registrations back
            torch.compiler.config.cache_key_tag = self._tag


def hold_operators(mode: PrecisionMode, device: torch.device, is_main: bool) -> HeldOperators:
    """Holds the policy's operators in FP32 for a launch, and logs which needed it.

    Raises:
        ConfigError: an operator computes in 16 bit all the same.
    """
    held = HeldOperators(device, mode.autocast_dtype)
    if held.by_mode and is_main:
        log.info(
            "%s on %s: autocast leaves %s in 16 bit; held in FP32 by the mode",
            mode.name, device.type, ", ".join(held.by_mode),
        )  # fmt: skip
    return held


def measure_operator(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Gives the dtype that an operator of the policy computes in under autocast, "float32" say."""
    _, call = _OPERATORS[name]
    narrow = torch.ones(_SIZE, _SIZE, device=device, dtype=dtype)
    with _Seen() as seen, torch.autocast(device.type, dtype=dtype), torch.no_grad():
        call(narrow)
    return "+".join(sorted(seen.dtypes))


def under_autocast(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """In place: the forward runs under autocast, for an engine whose own copies are all it needs.

    DeepSpeed computes in 16-bit copies of the weights: products are what they are without, and the
    operators of the policy are FP32.
    """
    model.forward = torch.autocast(device.type, dtype=dtype)(model.forward)  # type: ignore[method-assign]


def narrow_part(operation: str, dtypes: set[str]) -> str | None:
    """Gives what an operation is when it must be FP32 and had an input of 16 bit; else None."""
    if not dtypes & {"float16", "bfloat16"}:
        return None
    return next((what for part, what in SENSITIVE.items() if part in operation), None)


def float_dtypes(values: Any) -> set[str]:
    """Gives the floating dtypes among the tensors of a tree, such as {"float32"}."""
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {str(x.dtype).removeprefix("torch.") for x in leaves if x.is_floating_point()}


class _Seen(TorchDispatchMode):
    """Notes the dtypes of inputs of sensitive operations, after autocast has cast them."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(part in func.overloadpacket.__name__ for part in SENSITIVE):
            self.dtypes |= float_dtypes(args)
        return func(*args, **(kwargs or {}))


def _in_fp32(operator: str, device_type: str) -> Callable[..., Any]:
    """The rule: FP32 inputs, FP32 result; a 16-bit dtype asked for by name is made at the end."""
    packet, _, overload = operator.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def in_fp32(*inputs: Any, **named: Any) -> Any:
        given = (*inputs, *named.values())
        asked = next((v for v in given if isinstance(v, torch.dtype) and v in NARROW), None)
        with torch.autocast(device_type, enabled=False):
            wide = {name: _wide(value) for name, value in named.items()}
            result = function(*map(_wide, inputs), **wide)
        return result if asked is None else result.to(asked)

    return in_fp32


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in NARROW else value
    return None if isinstance(value, torch.dtype) and value in NARROW else value


def _attention(device: torch.device, dtype: torch.dtype) -> float:
    """What fused attention makes of 4096 equal scores over values 1 and 0, half of each: 0.5.

    It adds up inside its kernel, where no dtype can be seen: a sum in 16 bit gives more.
    """
    values = torch.zeros(1, 1, _KEYS, _SIZE, device=device)
    values[..., : _KEYS // 2, :] = 1.0
    query = torch.zeros(1, 1, 1, _SIZE, device=device)
    with torch.autocast(device.type, dtype=dtype), torch.no_grad():
        found = F.scaled_dot_product_attention(query, torch.ones_like(values), values)
    return float(found.mean())


def _still_narrow(name: str, found: str) -> ConfigError:
    return ConfigError(
        f"{name} under autocast computes in {found}",
        expected="float32: softmax, normalisation and loss add up many terms",
        where="precision",
        action="choose --precision fp32, and report this together with `mprecipes env`",
    )
