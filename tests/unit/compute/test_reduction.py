# SPDX-License-Identifier: Apache-2.0
"""Gradients are summed over processes in the dtype that was asked for."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mprecipes.compute.reduction import GradientReduction
from mprecipes.errors import ConfigError


@pytest.fixture
def group(tmp_path):
    """A gloo group of this one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradient(wanted):
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    reduction = GradientReduction(model, wanted)
    (model(torch.ones(1, 1)) * (1 + 2**-9 + 2**-12)).sum().backward()
    reduction.verify()
    return model.module.weight.grad, reduction.seen


@pytest.mark.parametrize(
    ("wanted", "seen", "value"),
    [
        ("fp32", "float32", 1 + 2**-9 + 2**-12),
        ("bf16", "bfloat16", 1.0),
        ("fp16", "float16", 1 + 2**-9),
    ],
)
def test_what_is_asked_goes_between_processes(group, wanted, seen, value):
    """1 + 2^-9 + 2^-12 comes back as what each dtype holds of it; gradients stay FP32."""
    found, dtypes = gradient(wanted)
    assert (found.item(), found.dtype, dtypes) == (value, torch.float32, {seen})


def test_another_dtype_is_refused(group):
    """Sabotage: BF16 was asked for, and nothing went through the hook."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    reduction = GradientReduction(model, "bf16")
    with pytest.raises(ConfigError) as caught:
        reduction.verify()
    error = caught.value
    assert error.found == "gradients were summed in nothing" and error.expected == "bfloat16"
    assert "reduce_dtype" in error.where and "mprecipes env" in error.action


def test_one_process_without_ddp_sums_nothing():
    """A bare model is left alone."""
    GradientReduction(torch.nn.Linear(1, 1), "bf16").verify()
