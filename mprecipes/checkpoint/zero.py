# SPDX-License-Identifier: Apache-2.0
"""State under DeepSpeed's ZeRO stages 1 to 3, as fragments of the full FP32 masters and moments.

A rank's engine holds flat partitions (`compute/partitions.py`); padding is left out. None of
DeepSpeed's own objects are saved. What the model computes with, in 16 bit or FP32, are working
copies: they are cast from the masters, never loaded.

Source: deepspeed 0.19, runtime/zero/stage_1_and_2.py, stage3.py.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mprecipes.checkpoint.fragments import own_key
from mprecipes.checkpoint.modules import is_deepspeed, unsupported, weights_of
from mprecipes.compute.partitions import Part, parts_of
from mprecipes.compute.updates import flat_gradients, masters_of

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def engine_of(model: torch.nn.Module) -> Any | None:
    """Gives the engine when DeepSpeed shards the optimizer, None for any other model.

    Raises:
        ConfigError: a stage without sharding, or state swapped out to NVMe.
    """
    if not is_deepspeed(model):
        return None
    engine: Any = model
    stage = int(engine.zero_optimization_stage())
    if stage not in (1, 2, 3) or (stage == 3 and engine.optimizer.swap_optimizer):
        raise unsupported(f"DeepSpeed with ZeRO stage {stage}{' and NVMe' if stage == 3 else ''}")
    return engine


def live_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Gives this rank's masters, optimizer state, and what is not sharded; references."""
    parts = {part.name: part for part in parts_of(engine)}
    live: dict[str, torch.Tensor] = {}
    for name, tensor in weights_of(engine).items():
        if name in parts:
            _add(live, f"weights/{name}", parts[name], parts[name].flat)
        else:
            live[f"weights/{name}"] = tensor.detach()
    states = engine.optimizer.optimizer.state
    for part in parts.values():
        for key, value in sorted(states.get(part.flat, {}).items()):
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise unsupported(f"optimizer state {key!r} of {part.name} is a {kind}")
            if value.shape == part.flat.shape:
                _add(live, f"optimizer/{part.name}/{key}", part, value)
            else:  # a step counter: one for all parameters of a group, on every rank
                live[f"optimizer/{part.name}/{key}"] = value.detach()
    return live


def full_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Gives a tensor of full shape and stored dtype per weight, without memory."""
    masters = {part.name: part.shape for part in parts_of(engine)}
    full = {}
    for name, tensor in weights_of(engine).items():
        shape = masters.get(name) or tuple(tensor.__dict__.get("ds_shape", tensor.shape))
        dtype = torch.float32 if name in masters else tensor.dtype
        full[f"weights/{name}"] = torch.empty(shape, dtype=dtype, device="meta")
    return full


def prepare_state(engine: Any, stored: Mapping[str, torch.Tensor]) -> list[str]:
    """Gives what does not fit; when all does, the optimizer has the stored kinds of state after.

    Args:
        stored: name -> full tensor, also without memory.
    """
    parts, expected = list(parts_of(engine)), full_weights(engine)
    keys: dict[int, dict[str, torch.Tensor]] = {}
    for part in parts:
        prefix = f"optimizer/{part.name}/"
        found = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
        keys.setdefault(id(part.flat), {}).update(found)
    for part in parts:
        for key, like in keys[id(part.flat)].items():
            shape = part.shape if key in MOMENTS else like.shape
            full = torch.empty(shape, dtype=like.dtype, device="meta")
            expected[f"optimizer/{part.name}/{key}"] = full
    problems = [f"{name}: unexpected" for name in stored if name not in expected]
    problems += [f"{name}: missing" for name in expected if name not in stored]
    for name in expected.keys() & stored.keys():
        have, want = _describe(stored[name]), _describe(expected[name])
        if have != want:
            problems.append(f"{name}: {have}, the live one is {want}")
    if problems:
        return problems
    optimizer = engine.optimizer.optimizer
    on_device = any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    for part in parts:
        old, new = optimizer.state.get(part.flat, {}), {}
        for key, like in keys[id(part.flat)].items():
            shape = part.flat.shape if key in MOMENTS else like.shape
            device = part.flat.device if key in MOMENTS or on_device else torch.device("cpu")
            fits = key in old and old[key].shape == shape
            new[key] = old[key] if fits else torch.zeros(shape, dtype=like.dtype, device=device)
        optimizer.state[part.flat] = new
    return []


def refresh(engine: Any) -> None:
    """Collective: casts the working copies anew from the masters."""
    zero = engine.optimizer
    with torch.no_grad():
        if int(engine.zero_optimization_stage()) < 3:
            zero.update_lp_params()
            return
        for number, masters in enumerate(masters_of(engine)):
            zero.fp16_partitioned_groups_flat[number].data.copy_(masters.data)
            zero._unflatten_partitioned_parameters(number)
        if zero.persistent_parameters:  # small ones are kept whole on every rank
            zero.persistent_parameters[0].partition(zero.persistent_parameters)
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def gradients(engine: Any) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Gives (parameter, this rank's part of its reduced gradient, index of its first element)."""
    flats = {id(flat): number for number, flat in enumerate(masters_of(engine))}
    found = flat_gradients(engine)
    for part in parts_of(engine):
        if part.count:
            yield part.name, part.of(found[flats[id(part.flat)]]), part.start


def stale_working_copies(engine: Any) -> list[str]:
    """Gives the parameters whose working copy is not the cast of the master, bit for bit."""
    return [
        part.name
        for part in parts_of(engine)
        if not torch.equal(part.of(part.flat).to(part.working), part.working)
    ]


def working_copies(engine: Any) -> dict[str, torch.Tensor]:
    """Gives what every rank holds in full of the working copies; nothing in stage 3."""
    if int(engine.zero_optimization_stage()) == 3:
        return {}
    return {f"working/{name}": tensor.detach() for name, tensor in weights_of(engine).items()}


def _add(live: dict[str, torch.Tensor], name: str, part: Part, flat: torch.Tensor) -> None:
    mine = part.of(flat)
    if part.count:
        live[own_key(name, part.shape, part.start, mine)] = mine
    elif not math.prod(part.shape):
        live[name] = mine.view(part.shape)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
