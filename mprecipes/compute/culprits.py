# SPDX-License-Identifier: Apache-2.0
"""Which layer was the first whose numbers were not finite.

Forward: the first block of the model (a member of a ModuleList) whose output is not finite.
Backward runs the other way: of the parameters whose gradient is not finite, that of the module
that was called last. Clipping makes every gradient NaN when one is, so norms are taken before it.
Nothing waits for the device until a name is asked for.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mprecipes.compute.ranks import Ranks

_WRAPPERS = re.compile(r"(?<![^.])(?:module|_orig_mod|_checkpoint_wrapped_module)\.")


def clean_name(name: str) -> str:
    """Gives the name without what DDP and `torch.compile` put before it."""
    return _WRAPPERS.sub("", name)


class BlockWatch:
    """Notes a sum of each block's output in every forward; costs one pass over each.

    Args:
        model: bare or wrapped; a compiled one is left alone, since hooks would break its graph.

    Attributes:
        calls: modules with parameters, as the first step called them for the last time.
        measure: is given the name of each block and its output, and of each FP8 module and its
            input, while it is set.
    """

    measure: Callable[[str, torch.Tensor, bool], None] | None = None

    def __init__(self, model: torch.nn.Module) -> None:
        self._noted: list[tuple[str, torch.Tensor]] = []
        self.names: list[str] = []
        self.calls: list[str] = []
        self._tracing: list[Any] = []
        if any(m._compiled_call_impl is not None for m in model.modules()):
            return
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                hook = self._call(clean_name(name))
                self._tracing.append(module.register_forward_pre_hook(hook))
            if type(module).__name__ == "Float8Linear":  # torchao is not imported for its name
                module.register_forward_pre_hook(self._input(clean_name(name)))
            if isinstance(module, torch.nn.ModuleList):
                for number, block in module.named_children():
                    self.names.append(clean_name(f"{name}.{number}"))
                    block.register_forward_hook(self._hook(self.names[-1]))

    def clear(self) -> None:
        """Forgets what was noted; call it once a step."""
        self._noted.clear()
        while self._tracing:
            self._tracing.pop().remove()

    def first_bad(self) -> str | None:
        """Gives the first block, in the order of computation, whose output was not finite."""
        for name, total in self._noted:
            if not bool(total.isfinite()):
                return name
        return None

    def _call(self, name: str) -> Any:
        def note(module: torch.nn.Module, inputs: Any) -> None:
            if name in self.calls:
                self.calls.remove(name)
            self.calls.append(name)

        return note

    def _hook(self, name: str) -> Any:
        def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor) and torch.is_grad_enabled():
                self._noted.append((name, first.detach().sum(dtype=torch.float32)))
                if self.measure is not None:
                    self.measure(name, first, False)

        return note

    def _input(self, name: str) -> Any:
        def note(module: torch.nn.Module, inputs: Any) -> None:
            if self.measure is not None and torch.is_grad_enabled():
                self.measure(name, inputs[0], True)

        return note


@dataclass(frozen=True)
class GradientPart:
    """What this rank holds of one parameter.

    Attributes:
        is_matrix: the whole parameter has two dimensions or more.
        weight: of the FP32 master.
        gradient: of the same elements; None where there is none.
    """

    name: str
    is_matrix: bool
    weight: torch.Tensor
    gradient: torch.Tensor | None


def parameter_parts(parameters: Mapping[str, torch.nn.Parameter]) -> list[GradientPart]:
    """Gives the parts of parameters that hold their gradients themselves, by clean name."""
    return [
        GradientPart(
            name,
            p.dim() >= 2,
            local_part(p.detach()),
            None if p.grad is None else local_part(p.grad),
        )
        for name, p in parameters.items()
    ]


class GradientNorms:
    """The L2 norm of each parameter's gradient, before clipping and as it stands, scaled or not.

    Args:
        model: bare or wrapped; with gradients summed over processes when `take` is called.
        ranks: over which the parts of a sharded model are summed.
        held: gives the parts of an engine that keeps gradients itself, unclipped until its update;
            they are then looked at when somebody asks, and `take` does nothing.

    Attributes:
        ranks: that hold parts; this process alone where each holds everything.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        ranks: Ranks | None = None,
        held: Callable[[], list[GradientPart]] | None = None,
    ) -> None:
        named = [(clean_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
        self._parameters, self._held = dict(named), held
        self._has_parts = any(isinstance(p, DTensor) for _, p in named)
        is_sharded = held is not None or self._has_parts
        self.ranks = ranks if ranks is not None and is_sharded else Ranks()
        self._has_grad: list[bool] = []
        self._norms: Sequence[torch.Tensor] = ()

    def parts(self) -> list[GradientPart]:
        """Gives what this rank holds of the trained parameters now; shares their memory."""
        return parameter_parts(self._parameters) if self._held is None else self._held()

    def take(self) -> None:
        """Computes the norms; does not wait for them. Each step pays for this, and for no more."""
        if self._held is not None:
            return
        grads = [parameter.grad for parameter in self._parameters.values()]
        self._has_grad = [grad is not None for grad in grads]
        given = [grad for grad in grads if grad is not None]
        local = [local_part(grad) for grad in given] if self._has_parts else given
        self._norms = torch._foreach_norm(local) if local else ()

    def _local(self) -> dict[str, float]:
        if self._held is None:
            norms = torch.stack([*self._norms]).tolist() if self._norms else []
            return dict(zip(compress(self._parameters, self._has_grad), norms, strict=True))
        grads = {part.name: part.gradient for part in self._held() if part.gradient is not None}
        if not grads:
            return {}
        norms = torch.stack([*torch._foreach_norm(list(grads.values()))]).tolist()
        return dict(zip(grads, norms, strict=True))

    def by_name(self) -> dict[str, float]:
        """Collective where the model is sharded: gives the norms of whole gradients.

        What was taken last, or is held now; waits for the device.
        """
        local = self._local()
        if self.ranks.world_size == 1:
            return local
        squares = self.ranks.sum([local.get(name, 0.0) ** 2 for name in self._parameters])
        return {name: square**0.5 for name, square in zip(self._parameters, squares)}

    def bad(self) -> list[str]:
        """Gives the parameters whose gradient was not finite on this rank, the last one first."""
        return [name for name, norm in self._local().items() if not math.isfinite(norm)][::-1]


def name_culprits(ranks: Ranks, blocks: BlockWatch, norms: GradientNorms) -> tuple[str, list[str]]:
    """Collective: gives where numbers first were not finite on any rank, and what was after it.

    Returns:
        a phrase such as "model.layers.3.mlp.down_proj", or "the output of model.layers.3", and the
        names of the modules concerned, most likely first; "an unknown place" and [] where nothing
        was seen.
    """
    mine = (blocks.first_bad(), norms.bad())
    found = ranks.gather(mine)
    forward = [block for block, _ in found if block is not None]
    if forward:
        first = min(forward, key=blocks.names.index)
        return f"the output of {first}", [first]
    modules = list(dict.fromkeys(n.rpartition(".")[0] for _, bad in found for n in bad))
    if modules:
        order = {name: number for number, name in enumerate(blocks.calls)}
        modules.sort(key=lambda name: -order.get(name, -1))  # stable: backward's own order
        return modules[0], modules
    return "an unknown place", []


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Gives this rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
