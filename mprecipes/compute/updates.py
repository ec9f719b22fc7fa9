# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's update, made where the recipe makes it, and the gradient before it.

DeepSpeed updates inside of accelerate's last `backward`: gradient and norm could not be looked at
before they are applied, nor an update be left out. Here `backward` only sums gradients,
`clip_grad_norm_` gives the norm of what was summed, `optimizer.step()` clips and updates, and
`zero_grad` drops.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mprecipes.compute.scaling import LossScaler


def step_where_the_recipe_does(
    accelerator: Any, engine: Any, scaler: LossScaler | None = None
) -> None:
    """Takes DeepSpeed's update out of accelerate's `backward`, to the recipe's `optimizer.step()`.

    Under FP16 the loss scale is that of `scaler`, of which DeepSpeed is told before each backward:
    it multiplies with it there and divides by it in its update. Its own scaler decides nothing.
    Source: accelerate 1.15, utils/deepspeed.py, DeepSpeedEngineWrapper and ...OptimizerWrapper;
    deepspeed 0.19, `override_loss_scale` of its optimizers.
    """

    def backward(loss: torch.Tensor, **options: Any) -> None:
        if scaler is not None:
            engine.optimizer.override_loss_scale(scaler.current)
        engine.backward(loss, **options)

    def norm() -> float:
        scaled = gradient_norm(engine)
        if scaler is None:
            return scaled
        scaler.note(not math.isfinite(scaled))
        return scaled / scaler.current

    def step(closure: None = None) -> None:
        engine.step()
        if scaler is not None:
            scaler.update()

    accelerator.deepspeed_engine_wrapped.engine = SimpleNamespace(
        set_gradient_accumulation_boundary=engine.set_gradient_accumulation_boundary,
        backward=backward,
        step=lambda: None,
        get_global_grad_norm=norm,
        destroy=engine.destroy,
    )
    for optimizer in accelerator._optimizers:
        optimizer.step = step
        optimizer.zero_grad = lambda set_to_none=None: forget_gradients(engine)


def masters_of(running: Any) -> list[torch.Tensor]:
    """Gives the flat partitions of FP32 masters that this rank of a DeepSpeed engine updates.

    Source: deepspeed 0.19, which names them differently in each of its three optimizers.
    """
    zero = running.optimizer
    if int(running.zero_optimization_stage()) == 3:
        return list(zero.fp32_partitioned_groups_flat)
    if type(zero).__name__ == "BF16_Optimizer":
        return list(zero.fp32_groups_flat_partition)
    return list(zero.single_partition_of_fp32_groups)


def flat_gradients(running: Any) -> list[torch.Tensor]:
    """Gives this rank's reduced gradients of a whole step, laid out as `masters_of`."""
    zero = running.optimizer
    if type(zero).__name__ == "BF16_Optimizer":
        return list(zero.fp32_groups_gradient_flat_partition)
    masters = masters_of(running)
    if int(running.zero_optimization_stage()) == 3:
        on_host = zero.offload_optimizer
    else:
        on_host = zero.cpu_offload
    if on_host:
        return [torch.zeros_like(m) if m.grad is None else m.grad for m in masters]
    found = []
    for number, master in enumerate(masters):
        parts = zero.averaged_gradients.get(number) or []
        flat = torch.cat([part.detach().reshape(-1) for part in parts] or [master[:0].detach()])
        found.append(F.pad(flat, (0, len(master) - len(flat))))  # the last partition is padded
    return found


def gradient_norm(running: Any) -> float:
    """Collective: gives the L2 norm of the whole gradient as it stands, unclipped."""
    flats = flat_gradients(running)
    squares = torch.stack([flat.double().square().sum() for flat in flats]).sum()
    squares = squares.to(running.device)
    dist.all_reduce(squares)
    return float(squares.sqrt())


def forget_gradients(running: Any) -> None:
    """Drops what backward passes have accumulated, applied or not.

    Source: deepspeed 0.19, what its optimizers do with the gradients of a step that overflowed.
    """
    zero = running.optimizer
    if type(zero).__name__ == "BF16_Optimizer":
        zero.clear_hp_grads()
        zero.clear_lp_grads()
        return
    clear = zero.zero_grad
    clear(set_to_none=True)
    if int(running.zero_optimization_stage()) == 3:
        zero.averaged_gradients = {}
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()
        return
    zero._release_preflattened_grad_buffers()
    zero.micro_step_id = -1
    if zero.cpu_offload:
        zero.reset_cpu_buffers()
    for number in zero.averaged_gradients:
        zero.averaged_gradients[number] = None
    for number in zero.all_grad_tensors:
        zero.all_grad_tensors[number] = None
