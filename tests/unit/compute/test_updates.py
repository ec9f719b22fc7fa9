# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's update in the recipe's place: the gradient before it, the loss scale, drops."""

from types import SimpleNamespace

import pytest
import torch

from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.scaling import LossScaler
from mprecipes.compute.updates import (
    flat_gradients,
    forget_gradients,
    gradient_norm,
    masters_of,
    step_where_the_recipe_does,
)


class Zero:
    """Stage 2 as this rank sees it after the last backward of a step: gradient (3, 4), padded."""

    cpu_offload, micro_step_id = False, 7

    def __init__(self):
        self.parameter = torch.nn.Parameter(torch.zeros(2))
        self.parameter.grad = torch.ones(2)
        self.single_partition_of_fp32_groups = [torch.zeros(3, requires_grad=True)]
        self.averaged_gradients = {0: [torch.tensor([3.0]), torch.tensor([4.0])]}
        self.all_grad_tensors = {0: None}
        self.released = False

    def override_loss_scale(self, scale):
        self.told = scale

    def zero_grad(self, set_to_none):
        self.parameter.grad = None

    def _release_preflattened_grad_buffers(self):
        self.released = True


class BF16_Optimizer:
    """Stage 1 in BF16 with FP32 accumulation."""

    def __init__(self):
        self.fp32_groups_flat_partition = [torch.zeros(2)]
        self.fp32_groups_gradient_flat_partition = [torch.tensor([3.0, 4.0])]

    def clear_hp_grads(self):
        self.fp32_groups_gradient_flat_partition[0].zero_()

    def clear_lp_grads(self):
        pass


class Running:
    """A stand-in of DeepSpeed's engine around one of these optimizers."""

    device = torch.device("cpu")

    def __init__(self, optimizer):
        self.optimizer, self.steps, self.losses = optimizer, 0, []

    def zero_optimization_stage(self):
        return 2

    def set_gradient_accumulation_boundary(self, is_boundary):
        pass

    def backward(self, loss):
        self.losses.append(loss)

    def destroy(self):
        pass

    def step(self):
        self.steps += 1


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)


@pytest.mark.parametrize("kind", [Zero, BF16_Optimizer])
def test_the_gradient_is_known_before_it_is_applied(alone, kind):
    """As long as the masters, padding zero; norm 5; and dropped without a trace."""
    running = Running(kind())
    (flat,), (master,) = flat_gradients(running), masters_of(running)
    assert flat[:2].tolist() == [3.0, 4.0] and len(flat) == len(master)
    assert gradient_norm(running) == 5.0
    forget_gradients(running)
    assert gradient_norm(running) == 0.0
    if kind is Zero:
        assert running.optimizer.parameter.grad is None and running.optimizer.released
        assert running.optimizer.micro_step_id == -1


def accelerated(running):
    """A stand-in of the Accelerator around such an engine, and its one optimizer."""
    optimizer = SimpleNamespace(step=None, zero_grad=None)
    wrapped = SimpleNamespace(engine=running)
    return SimpleNamespace(deepspeed_engine_wrapped=wrapped, _optimizers=[optimizer]), optimizer


def test_the_update_is_made_where_the_recipe_says(alone):
    """Accelerate's backward no longer updates; `optimizer.step()` does, `zero_grad` drops."""
    running = Running(BF16_Optimizer())
    accelerator, optimizer = accelerated(running)
    step_where_the_recipe_does(accelerator, running)
    accelerator.deepspeed_engine_wrapped.engine.step()
    assert running.steps == 0
    assert accelerator.deepspeed_engine_wrapped.engine.get_global_grad_norm() == 5.0
    optimizer.step()
    assert running.steps == 1
    optimizer.zero_grad()
    assert gradient_norm(running) == 0.0


def test_the_loss_scale_is_the_projects_own(alone):
    """DeepSpeed is told the scale before each backward; the norm given is without it."""
    running, scaler = Running(Zero()), LossScaler("cpu", NumericsPolicy(initial_loss_scale=4.0))
    accelerator, optimizer = accelerated(running)
    step_where_the_recipe_does(accelerator, running, scaler)
    engine = accelerator.deepspeed_engine_wrapped.engine
    engine.backward(torch.tensor(1.0))
    assert (running.optimizer.told, running.losses) == (4.0, [torch.tensor(1.0)])
    assert engine.get_global_grad_norm() == 1.25
    assert float(scaler.found_inf()) == 0.0
    optimizer.step()
    assert running.steps == 1
    with pytest.raises(AssertionError, match="clip_grad_norm_ comes before"):
        scaler.found_inf()  # of the next step nothing is known yet
    running.optimizer.averaged_gradients[0][1].fill_(torch.inf)  # on one rank: the norm is all's
    assert engine.get_global_grad_norm() == torch.inf
    assert float(scaler.found_inf()) == 1.0
    assert scaler.settle(overflowed=True).after == 2.0
    engine.backward(torch.tensor(1.0))
    assert running.optimizer.told == 2.0
