# SPDX-License-Identifier: Apache-2.0
"""The engines that share a training over processes: what works, what is written, what is read back.

One table says which engine works in which precision and why not; the launch refuses the rest.
DeepSpeed's settings that must follow the recipe (clipping, accumulation, batch, precision) are
written as numbers before it is built, so that there is no second source of truth, and read back
from the running engine: accelerate fills in 1.0 for a clipping that is "auto" or absent (measured).
"""

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from mprecipes.compute.launcher import deepspeed_file, is_set
from mprecipes.compute.precision import MODES, PrecisionMode
from mprecipes.compute.ranks import BatchPlan
from mprecipes.compute.updates import masters_of
from mprecipes.errors import ConfigError

_CLIPPING, _ACCUMULATION = "gradient_clipping", "gradient_accumulation_steps"
_MICRO, _GLOBAL = "train_micro_batch_size_per_gpu", "train_batch_size"


@dataclass(frozen=True)
class Engine:
    """One row of the table of engines.

    Attributes:
        name: ddp, fsdp2, zero1, zero2, zero3; with `_offload` when DeepSpeed keeps the optimizer on
            the host.
        distributed_types: accelerate's names for it.
        refused: precision -> why this engine does not work in it.
        origin: file that asked for it, for messages.
        deepspeed: DeepSpeed's settings as found in their file; None for other engines.
    """

    name: str
    distributed_types: tuple[str, ...]
    refused: Mapping[str, str]
    origin: str = ""
    deepspeed: Mapping[str, Any] | None = None

    @property
    def zero_stage(self) -> int | None:
        return int(self.name[4]) if self.name.startswith("zero") else None


_FP8 = {
    "fp8": "torchao's Float8Linear holds each gathered weight until its backward, so that weights "
    "would not be sharded; use fsdp2 or zero2"
}
ENGINES = {
    "ddp": Engine("ddp", ("MULTI_GPU", "MULTI_CPU", "NO"), {}),
    "fsdp2": Engine("fsdp2", ("FSDP",), {}),
    **{
        name: Engine(name, ("DEEPSPEED",), _FP8 if "3" in name else {})
        for name in ("zero1", "zero2", "zero3", "zero1_offload", "zero2_offload", "zero3_offload")
    },
}


def asked_engine(asked: Mapping[str, Any]) -> Engine:
    """Gives the engine that the launcher was asked for.

    Args:
        asked: of `asked_by_launcher`.

    Raises:
        ConfigError: it is one this version does not drive, or the launcher dropped it.
    """
    origin = str(asked["origin"])
    if is_set("ACCELERATE_USE_MEGATRON_LM"):
        raise _not_driven(f"Megatron-LM ({origin})", "data is shared out, not layers")
    if is_set("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise _not_driven(
            f"a ParallelismConfig ({origin})", "context and tensor parallelism are not driven yet"
        )
    wanted = asked.get("distributed_type")
    for kind, variable in (
        ("DEEPSPEED", "ACCELERATE_USE_DEEPSPEED"),
        ("FSDP", "ACCELERATE_USE_FSDP"),
    ):
        if wanted == kind and not is_set(variable):
            raise ConfigError(
                f"plain data parallel would run after asking for {kind} ({origin})",
                expected=f"{variable}=true from the launcher",
                where="accelerate launch",
                action="drop --cpu and other flags that make the launcher forget the engine",
            )
    if is_set("ACCELERATE_USE_DEEPSPEED"):
        settings, place = deepspeed_file(origin)
        about = settings.get("zero_optimization", {})
        devices = [about.get(f"offload_{part}", {}).get("device", "none") for part in _OFFLOADED]
        name = f"zero{about.get('stage', 0)}" + ("_offload" if "cpu" in devices else "")
        if name not in ENGINES or "nvme" in devices:
            raise _not_driven(f"DeepSpeed {name} ({place})", "of the stages 1 to 3 without NVMe")
        row = ENGINES[name]
        return Engine(name, row.distributed_types, row.refused, place, settings)
    name = "ddp"
    if is_set("ACCELERATE_USE_FSDP"):
        if os.environ.get("FSDP_VERSION", "1") != "2":
            raise _not_driven(f"FSDP version 1 ({origin})", "fsdp_version 2 in fsdp_config")
        name = "fsdp2"
    row = ENGINES[name]
    return Engine(name, row.distributed_types, row.refused, origin)


_OFFLOADED = ("optimizer", "param")


def _not_driven(found: str, expected: str) -> ConfigError:
    return ConfigError(
        f"the launcher asks for {found}",
        expected=f"an engine that is driven here: {', '.join(ENGINES)} ({expected})",
        where="accelerate config",
        action="use one of accelerate_configs/",
    )


def said_precision(engine: Engine) -> str | None:
    """Gives the precision that DeepSpeed's own file names; None when it is silent."""
    settings = engine.deepspeed or {}
    for name in ("bf16", "fp16"):
        if settings.get(name, {}).get("enabled") is True:
            return name
    return None


def require_pair(engine: Engine, mode: PrecisionMode) -> None:
    """Refuses a precision that the table does not offer on this engine.

    Raises:
        ConfigError: with the table's reason.
    """
    if (reason := engine.refused.get(mode.name)) is not None:
        offered = [name for name in MODES if name not in engine.refused]
        raise ConfigError(
            f"{mode.name} on {engine.name} ({engine.origin}): {reason}",
            expected=f"on {engine.name} one of {', '.join(offered)}",
            where="precision",
            action="choose one of these, or another engine of accelerate_configs/",
        )


def deepspeed_settings(
    engine: Engine, mode: PrecisionMode, plan: BatchPlan, max_grad_norm: float | None
) -> dict[str, Any]:
    """Gives the settings DeepSpeed is built with: its file's, and the recipe's as numbers.

    Raises:
        ConfigError: the file names another number than the recipe, or more of the precision than
            which one.
    """
    settings = dict(engine.deepspeed or {})
    written = {
        _CLIPPING: max_grad_norm or 0.0,
        _ACCUMULATION: plan.accumulation,
        _MICRO: plan.micro_batch,
        _GLOBAL: plan.global_batch,
    }
    option = {
        _CLIPPING: "max_grad_norm",
        _ACCUMULATION: "gradient_accumulation_steps",
        _MICRO: "per_device_train_batch_size",
        _GLOBAL: "global_batch_size",
    }
    _refuse_precision_said_twice(engine, settings)
    for key, value in written.items():
        said = settings.get(key, "auto")
        if said != "auto" and said != value:
            raise _differs(f"{key} {said} ({engine.origin})", f"{option[key]} {value}", key)
    settings |= written
    settings["bf16"] = {"enabled": mode.compute_dtype == "bfloat16", "check_grad_overflow": True}
    # a static scale, which `step_where_the_recipe_does` overrides: DeepSpeed's scaler never decides
    settings["fp16"] = {"enabled": mode.compute_dtype == "float16", "loss_scale": 1.0}
    settings["data_types"] = {"grad_accum_dtype": _SHORT[mode.accumulate_dtype]}
    settings["communication_data_type"] = _SHORT[mode.reduce_dtype]
    settings["zero_allow_untested_optimizer"] = True
    settings["zero_force_ds_cpu_optimizer"] = False  # or it compiles one of its own
    return settings


def _refuse_precision_said_twice(engine: Engine, settings: Mapping[str, Any]) -> None:
    """Of a DeepSpeed file's sections on precision only `enabled` of bf16 and fp16 is read."""
    for section in ("fp16", "bf16", "torch_autocast", "data_types"):
        for key, said in settings.get(section, {}).items():
            is_read = key == "enabled" and section in ("fp16", "bf16")
            if is_read or said is None or said is False or said == "auto":
                continue
            option = _SCALING.get(key) if section == "fp16" else None
            raise ConfigError(
                f"{section}.{key} {said} ({engine.origin})",
                expected="precision and loss scale said once, by the recipe",
                where=key,
                action="leave it out of the DeepSpeed file"
                + (f" and write {option} in numerics" if option else "; see docs/precision.md"),
            )


_SCALING = {
    "loss_scale": "loss_scale",
    "initial_scale_power": "initial_loss_scale",
    "loss_scale_window": "loss_scale_growth_interval",
    "hysteresis": "loss_scale_hysteresis",
    "min_loss_scale": "loss_scale_floor",
}
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def read_back(
    engine: Engine, running: Any, mode: PrecisionMode, plan: BatchPlan, max_grad_norm: float | None
) -> dict[str, Any]:
    """Gives what the running DeepSpeed engine really does, when it is what was asked.

    Raises:
        ConfigError: a setting differs; found and asked are named.
    """
    zero = running.optimizer
    own_class = type(zero).__name__ == "BF16_Optimizer"
    accumulate = zero.grad_acc_dtype if own_class else zero.gradient_accumulation_dtype
    found = {
        "zero_stage": int(running.zero_optimization_stage()),
        _CLIPPING: float(running.gradient_clipping()),
        "clip_grad of the optimizer": float(zero.clip_grad),
        _ACCUMULATION: int(running.gradient_accumulation_steps()),
        _MICRO: int(running.train_micro_batch_size_per_gpu()),
        _GLOBAL: int(running.train_batch_size()),
        "compute_dtype": _name({p.dtype for p in running.module.parameters() if p.requires_grad}),
        "accumulate_dtype": _name({accumulate}),
        "reduce_dtype": _name({running.communication_data_type}),
        "master_dtype": _name({flat.dtype for flat in masters_of(running)}),
    }
    clipping = float(max_grad_norm or 0.0)
    wanted = {
        "zero_stage": engine.zero_stage,
        _CLIPPING: clipping,
        "clip_grad of the optimizer": clipping,
        _ACCUMULATION: plan.accumulation,
        _MICRO: plan.micro_batch,
        _GLOBAL: plan.global_batch,
        "compute_dtype": mode.compute_dtype,
        "accumulate_dtype": mode.accumulate_dtype,
        "reduce_dtype": mode.reduce_dtype,
        "master_dtype": mode.master_dtype,
    }
    for fact, value in found.items():
        if value != wanted[fact]:
            raise _differs(f"{fact} measured as {value}", f"{fact} {wanted[fact]}", engine.name)
    return found


def read_back_fsdp(model: torch.nn.Module, mode: PrecisionMode) -> dict[str, Any]:
    """Gives what FSDP2 computes, reduces and keeps in, when it is what was asked.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_state.py.

    Raises:
        ConfigError: a dtype differs in some of its units, or there are none.
    """
    states = [unit._get_fsdp_state() for unit in model.modules() if isinstance(unit, FSDPModule)]
    policies = [state._mp_policy for state in states]
    found = {
        "compute_dtype": _name({policy.param_dtype for policy in policies}),
        "reduce_dtype": _name({policy.reduce_dtype for policy in policies}),
        "output_dtype": _name({policy.output_dtype for policy in policies}),
        "master_dtype": _name({p.dtype for p in model.parameters() if p.requires_grad}),
    }
    for fact, value in found.items():
        wanted = "float32" if fact == "output_dtype" else getattr(mode, fact)
        if value != wanted:
            raise ConfigError(
                f"{fact} measured as {value or 'nothing'} in the units of FSDP2",
                expected=f"{fact} {wanted}",
                where="accelerator.prepare",
                action="give prepare the model itself, whole, and no fsdp_config of another policy",
            )
    return found


def _name(dtypes: Set[torch.dtype | None]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _differs(found: str, expected: str, where: str) -> ConfigError:
    return ConfigError(
        found,
        expected=f"{expected}, as the recipe says",
        where=where,
        action='leave it out of the DeepSpeed file (or "auto"): it is written from the recipe',
    )
