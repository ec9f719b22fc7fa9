# SPDX-License-Identifier: Apache-2.0
"""What runs is what was asked for, on every rank: processes, engine, scaler, settings."""

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mprecipes.compute.engines import Engine
from mprecipes.compute.precision import PrecisionMode
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import ConfigError


def check_built(accelerator: Any, engine: Engine, mode: PrecisionMode, accumulation: int) -> None:
    """Refuses an Accelerator that is not what the engine, the mode and the recipe asked for.

    Args:
        accumulation: micro-batches of an optimizer step on each rank.

    Raises:
        ConfigError: naming what accelerate made and what was asked.
    """
    if (accelerator.scaler is not None) != (mode.scaler is not None):
        raise ConfigError(
            f"loss scaler {accelerator.scaler!r} in mode {mode.name}",
            expected=f"scaler: {mode.scaler or 'none'}",
            where="precision",
            action="report this together with `mprecipes env`",
        )
    kind = str(accelerator.distributed_type.value)
    if kind not in engine.distributed_types:
        raise ConfigError(
            f"accelerate runs {kind} after asking for {engine.name} ({engine.origin})",
            expected=" or ".join(engine.distributed_types),
            where="accelerate launch",
            action="use one of accelerate_configs/ unchanged; the launcher's settings were ignored",
        )
    if accelerator.gradient_accumulation_steps != accumulation:
        raise ConfigError(
            f"accelerate accumulates over {accelerator.gradient_accumulation_steps} forwards",
            expected=f"{accumulation}, as the recipe says",
            where="gradient_accumulation_steps",
            action="use one of accelerate_configs/ unchanged; the launcher's settings were ignored",
        )


def check_alike(
    ranks: Ranks,
    engine: Engine,
    measured: Mapping[str, Any],
    max_grad_norm: float | None,
    on_each_node: bool,
) -> None:
    """Collective: refuses ranks that were started with other settings than rank 0."""
    local = ("local_world_size", "cpu_threads")
    topology = {k: v for k, v in measured["topology"].items() if k not in local}
    mine = {
        **topology,
        "precision": measured["precision"]["mode"],
        "max_grad_norm": max_grad_norm,
        "DeepSpeed settings": engine.deepspeed,
        "fallback in run.json": measured["precision"]["rungs"],
        "on_each_node": on_each_node,
    }
    everyone = ranks.gather(mine)
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                raise ConfigError(
                    f"{name} is {other[name]} on rank {rank}",
                    expected=f"{value}, as on rank 0",
                    where=f"accelerate launch of rank {rank}",
                    action="launch every machine with the same config files and options",
                )


def check_processes(asked: Mapping[str, Any], world_size: int) -> None:
    """Refuses a launcher that started fewer processes than it was asked for."""
    wanted = asked.get("num_processes")
    if wanted is not None and wanted != world_size:
        raise ConfigError(
            f"{world_size} process runs after asking for {wanted} ({asked['origin']})",
            expected=f"WORLD_SIZE {wanted}",
            where="accelerate launch",
            action="use accelerate_configs/cpu.yaml or ddp.yaml: with --cpu or MULTI_CPU the "
            "launcher silently starts one process",
        )


def measure_ranks(accelerator: Any, world_size: int, timeout_seconds: int) -> Ranks:
    """Collective: checks that every process knows all of its peers, and makes the host group."""
    found = {
        "processes": accelerator.num_processes,
        "rank": accelerator.process_index,
        "torch.distributed processes": dist.get_world_size() if dist.is_initialized() else 1,
    }
    wanted = {
        "processes": world_size,
        "rank": int(os.environ.get("RANK", "0")),
        "torch.distributed processes": world_size,
    }
    if found != wanted:
        raise ConfigError(
            f"measured {found}",
            expected=str(wanted),
            where="accelerate launch",
            action="use one of accelerate_configs/ unchanged; the launcher's settings were ignored",
        )
    group = None
    if world_size > 1:
        limit = timedelta(seconds=timeout_seconds)
        group = dist.new_group(backend="gloo", timeout=limit)
    return Ranks(
        rank=accelerator.process_index,
        world_size=world_size,
        local_rank=accelerator.local_process_index,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        group=group,
        timeout_seconds=timeout_seconds,
    )
