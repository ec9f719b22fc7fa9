# SPDX-License-Identifier: Apache-2.0
"""Builds the Accelerator and then measures it: what was asked for is what runs, or nothing runs.

Accelerate 1.15 on CPU can silently run one process in place of two, or two trainings that both
think they are main; a launch whose measured topology or precision differs from what the launcher
and the recipe asked for is refused here.
"""

import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.commands.config import default_config_file

from mprecipes.compute.agreement import (
    check_alike,
    check_built,
    check_processes,
    measure_ranks,
)
from mprecipes.compute.building import build_accelerator
from mprecipes.compute.conversion import check_conversion, check_masters, convert_model
from mprecipes.compute.engines import (
    ENGINES,
    Engine,
    asked_engine,
    read_back,
    read_back_fsdp,
    require_pair,
    said_precision,
)
from mprecipes.compute.fallback import Descent, read_descent
from mprecipes.compute.kept import KeptInFp32
from mprecipes.compute.launcher import asked_by_launcher, cpu_threads, refuse_overrides
from mprecipes.compute.operators import HeldOperators, hold_operators
from mprecipes.compute.policy import NumericsPolicy, numerics_policy
from mprecipes.compute.precision import (
    MODES,
    REDUCE_DTYPES,
    PrecisionMode,
    advice_on,
    forbid_reduced_precision,
    measure_mode,
    require_hardware,
    resolve_mode,
)
from mprecipes.compute.ranks import BatchPlan, Ranks, plan_batches
from mprecipes.compute.scaling import LossScaler
from mprecipes.compute.updates import step_where_the_recipe_does
from mprecipes.identity.config import Origins, end_dry_run
from mprecipes.identity.recipe import RecipeIdentity

log = logging.getLogger(__name__)
COLLECTIVE_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Launch:
    """A started launch: the Accelerator, and what was measured of it.

    Attributes:
        measured: `precision` and `topology` as plain JSON values, for manifest and report.
        descent: mode and policy of the option `numerics`, after the rungs of a fallback.
        scaler: of FP16's loss; None in other modes.
        kept: modules held in FP32 by `convert`.
        operators: softmax, normalisation and loss, held in FP32 until the launch ends.
        recipe_folder: where validation records of FP8 are looked for; None asks for none.
    """

    accelerator: Accelerator
    ranks: Ranks
    plan: BatchPlan
    device: torch.device
    precision: PrecisionMode
    measured: dict[str, Any]
    engine: Engine = ENGINES["ddp"]
    max_grad_norm: float | None = None
    descent: Descent = field(default_factory=lambda: Descent(MODES["fp32"], NumericsPolicy()))
    scaler: LossScaler | None = None
    kept: KeptInFp32 = field(default_factory=KeptInFp32)
    operators: HeldOperators | None = None
    recipe_folder: Path | None = None

    @property
    def is_main(self) -> bool:
        return self.ranks.is_main

    @property
    def policy(self) -> NumericsPolicy:
        return self.descent.policy

    @property
    def learning_rate_factor(self) -> float:
        """1.0, or less after a fallback: what the recipe's learning rate is multiplied with."""
        return self.descent.learning_rate_factor

    def convert(self, model: torch.nn.Module, recipe: RecipeIdentity) -> torch.nn.Module:
        """Collective: makes a model compute in this launch's mode, in place, and gives it back.

        Call it before `prepare`. FP8: Float8Linear in place of Linear; `keep_in_fp32`: those
        modules without autocast. Parameters and their names stay. What was done is in `measured`.

        Raises:
            ConfigError: FP8 was not validated for this architecture, or has nothing to convert; a
                pattern matches no module; ranks built other weights.
        """
        convert_model(self, model, recipe)
        return model

    def check_masters(self, model: torch.nn.Module) -> None:
        """Refuses an engine without FP32 masters, or with other settings; call it after `prepare`.

        What was measured of the engine is noted in `measured`.

        Raises:
            ConfigError: naming the parameters and their dtypes, or the setting; or FP8 modules were
                lost.
        """
        if self.engine.zero_stage:
            found = read_back(self.engine, model, self.precision, self.plan, self.max_grad_norm)
            self.measured["topology"]["read_back"] = found
            step_where_the_recipe_does(self.accelerator, model, self.scaler)
        else:
            check_masters(model)
        if self.engine.name == "fsdp2":
            found = read_back_fsdp(model, self.precision)
            self.measured["topology"]["read_back"] = found
        check_conversion(self.measured, model)

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        if self.operators is not None:
            self.operators.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class LaunchOptions(Protocol):
    """The options of a recipe's config that `start` reads."""

    @property
    def precision(self) -> str: ...
    @property
    def per_device_train_batch_size(self) -> int: ...
    @property
    def gradient_accumulation_steps(self) -> int | None: ...
    @property
    def global_batch_size(self) -> int | None: ...
    @property
    def output_dir(self) -> str: ...
    @property
    def numerics(self) -> dict[str, Any] | None: ...


def start(
    config: LaunchOptions,
    origins: Mapping[str, str],
    *,
    collective_timeout_seconds: int = COLLECTIVE_TIMEOUT_SECONDS,
) -> Launch:
    """Collective: builds the Accelerator as the launcher and the recipe asked, and measures it.

    Without a GPU it sets up gloo, and computes with cores / processes threads
    (`MPRECIPES_CPU_THREADS` overrides; accelerate itself exports one thread).

    Args:
        origins: where each option came from, for messages.
        collective_timeout_seconds: limit of every collective.

    Raises:
        ConfigError: asked and measured differ, or the parts contradict each other.
        SystemExit: 0, after `--dry_run`, before anything is started.
    """
    asked, policy = asked_by_launcher(default_config_file), numerics_policy(config)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_processes(asked, world_size)
    engine = asked_engine(asked)
    said = said_precision(engine)  # DeepSpeed's file may name it in the place of the launcher
    mode = resolve_mode(
        config.precision,
        origin=origins["precision"],
        launcher=said or os.environ.get("ACCELERATE_MIXED_PRECISION"),
        launcher_origin=engine.origin if said else asked["origin"],
    )
    descent = read_descent(config.output_dir, mode, policy)
    policy = descent.policy
    mode = replace(descent.mode, reduce_dtype=REDUCE_DTYPES[policy.reduce_dtype])
    require_pair(engine, mode)
    max_grad_norm: float | None = getattr(config, "max_grad_norm", None)  # a recipe may never clip
    has_gpu = torch.cuda.is_available() and not asked["use_cpu"]
    plan = plan_batches(
        Ranks(rank=int(os.environ.get("RANK", "0")), world_size=world_size),
        micro_batch=config.per_device_train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        global_batch=config.global_batch_size,
    )
    refuse_overrides(plan.accumulation, mode.name)
    if isinstance(origins, Origins):
        end_dry_run(config, origins)
    if not has_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, once imported, warns
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(cpu_threads(local))
    torch.set_float32_matmul_precision(mode.float32_matmul)
    forbid_reduced_precision()
    accelerator = build_accelerator(
        engine, mode, plan, max_grad_norm, has_gpu, collective_timeout_seconds
    )
    require_hardware(mode, accelerator.device)
    ranks = measure_ranks(accelerator, world_size, collective_timeout_seconds)
    scaler = None
    if mode.scaler is not None:
        # accelerate 1.15 trains FP16 on a CPU in FP32, without a word and without a scaler
        scaler = LossScaler(accelerator.device.type, policy)
        accelerator.native_amp, accelerator.scaler = True, scaler
    check_built(accelerator, engine, mode, plan.accumulation)
    autocast = accelerator.autocast() if engine.name == "ddp" else None
    measured = {
        "precision": measure_mode(mode, accelerator.device, autocast, policy),
        "topology": {
            "engine": str(accelerator.distributed_type.value),
            "sharding": engine.name,
            "world_size": ranks.world_size,
            "local_world_size": ranks.local_world_size,
            "device": accelerator.device.type,
            "backend": dist.get_backend() if dist.is_initialized() else None,
            "accumulation": plan.accumulation,
            "cpu_threads": torch.get_num_threads(),
        },
    }
    operators = hold_operators(mode, accelerator.device, ranks.is_main)
    measured["precision"] |= {"operators_in_fp32": operators.facts}
    measured["precision"] |= {"fallback": list(descent.rungs), "rungs": descent.words()}
    on_each_node = bool((getattr(config, "checkpoint", None) or {}).get("on_each_node"))
    check_alike(ranks, engine, measured, max_grad_norm, on_each_node)
    ranks = ranks.with_node_writers() if on_each_node else ranks
    if (advice := advice_on(mode, accelerator.device)) and ranks.is_main:
        log.warning(advice)
    allowed = isinstance(origins, Origins) and origins.allow_unvalidated_fp8
    is_gated = mode.name == "fp8" and not allowed
    return Launch(
        accelerator, ranks, plan, accelerator.device, mode, measured,
        engine, max_grad_norm, descent, scaler, operators=operators,
        recipe_folder=Path(inspect.getfile(type(config))).parent if is_gated else None,
    )  # fmt: skip
