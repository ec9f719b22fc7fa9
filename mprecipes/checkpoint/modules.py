# SPDX-License-Identifier: Apache-2.0
"""A model without its wrappers, and what this rank holds of its tensors."""

import math
import re
import sys
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mprecipes.checkpoint.fragments import own_key
from mprecipes.errors import ConfigError

_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module)\.")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Gives the module inside DDP, DataParallel, DeepSpeed's engine and `torch.compile`."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel) or is_deepspeed(model):
            model = model.get_submodule("module")
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def is_deepspeed(model: torch.nn.Module) -> bool:
    """Whether the model is DeepSpeed's engine; imports nothing, for who has one has it loaded."""
    loaded = sys.modules.get("deepspeed")
    return loaded is not None and isinstance(model, loaded.DeepSpeedEngine)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2 or DeepSpeed's engine shares out the model or its masters over the ranks."""
    return is_deepspeed(model) or any(isinstance(p, DTensor) for p in model.parameters())


def clean(name: str) -> str:
    """Gives a parameter's name without what wrappers of parts of a model add."""
    return _WRAPPERS.sub("", name)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Trained parameters and persistent buffers by clean name; of tied ones the first name.

    A frozen parameter is no state of the training: `starting.model_facts` gives its digest.

    Raises:
        ConfigError: the model's state holds something that is not a tensor.
    """
    weights: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in unwrap(model).state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or name.endswith("_extra_state"):
            raise unsupported(f"{name} of the model's state_dict is not a parameter or buffer")
        is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        if id(tensor) not in seen and not is_frozen:
            seen.add(id(tensor))
            weights[clean(name)] = tensor
    return weights


def local_parts(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gives this rank's parts of tensors under their keys; they share memory with the tensors.

    Raises:
        ConfigError: one is sharded in another way than FSDP2 on one mesh dimension does.
    """
    for name, tensor in tensors:
        if not isinstance(tensor, DTensor):
            yield name, tensor.detach()
            continue
        mesh, placements = tensor.device_mesh, tensor.placements
        if mesh.ndim != 1 or placements != (Shard(0),):
            raise unsupported(f"{name} is placed as {placements} on a mesh {tuple(mesh.shape)}")
        rows = -(-tensor.shape[0] // mesh.size())  # as torch.chunk cuts; the last may be short
        start = min(tensor.shape[0], rows * mesh.get_local_rank()) * math.prod(tensor.shape[1:])
        local: torch.Tensor = cast(DTensor, tensor.detach()).to_local()
        flat = local.reshape(-1)
        if len(flat):
            yield own_key(name, tensor.shape, start, flat), flat
        elif not tensor.numel():
            yield name, flat.view(tensor.shape)


def unsupported(found: str) -> ConfigError:
    """Gives the error for state that cannot be restored by name."""
    return ConfigError(
        found,
        expected="tensors that belong to the model, so that they can be restored exactly by name",
        where="the state to checkpoint",
        action="register it as a parameter or buffer, or use an optimizer whose state is tensors",
    )
