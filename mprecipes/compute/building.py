# SPDX-License-Identifier: Apache-2.0
"""The Accelerator of each engine, on a CPU as on GPUs; what it really became is measured after."""

import logging
import warnings
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from mprecipes.compute.engines import Engine, deepspeed_settings
from mprecipes.compute.precision import PrecisionMode
from mprecipes.compute.ranks import BatchPlan

_RENAMED = r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"


def build_accelerator(
    engine: Engine,
    mode: PrecisionMode,
    plan: BatchPlan,
    max_grad_norm: float | None,
    has_gpu: bool,
    timeout_seconds: int,
) -> Accelerator:
    """Builds the Accelerator so that the engine runs, on a CPU as on GPUs.

    Source of the roads on a CPU: accelerate 1.15, state.py, where FSDP is a branch of MULTI_GPU and
    DeepSpeed one of `cpu=False`.
    """
    timeout = timedelta(seconds=timeout_seconds)
    backend = "gloo" if engine.zero_stage and not has_gpu else None
    arguments: dict[str, Any] = {}
    if engine.name != "ddp":  # torch 2.13 warns its own FSDP2, and DeepSpeed, in every step
        warnings.filterwarnings("ignore", _RENAMED, FutureWarning)
    if engine.zero_stage:
        settings = deepspeed_settings(engine, mode, plan, max_grad_norm)
        arguments["deepspeed_plugin"] = _deepspeed_plugin(settings, has_gpu)
    elif engine.name == "fsdp2":
        if not has_gpu:
            PartialState(cpu=True, timeout=timeout)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            PartialState._shared_state["device"] = torch.device("cpu")
        dtypes = {"param_dtype": getattr(torch, mode.compute_dtype)}
        dtypes["reduce_dtype"] = getattr(torch, mode.reduce_dtype)
        policy = MixedPrecisionPolicy(**dtypes, output_dtype=torch.float32)  # the loss stays FP32
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
        arguments["fsdp_plugin"] = plugin
    accelerator = Accelerator(
        mixed_precision=mode.autocast,
        cpu=not has_gpu and not engine.zero_stage,
        gradient_accumulation_steps=plan.accumulation,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            InitProcessGroupKwargs(backend=backend, timeout=timeout),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
        **arguments,
    )
    if engine.zero_stage == 3:
        # transformers 5.24 would build models in DeepSpeed's zero.Init, whatever zero3_init_flag
        # says: their initial weights were others than on every other engine (measured)
        unset_hf_deepspeed_config()
    return accelerator


def _deepspeed_plugin(settings: dict[str, Any], has_gpu: bool) -> DeepSpeedPlugin:
    """DeepSpeed with nothing compiled: on a CPU its shared-memory collectives would be."""
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # plain gloo
    if not has_gpu:  # it asks for AVX512-FP16; torch computes FP16 without
        get_accelerator().is_fp16_supported = lambda: True
    return DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=False)
