# SPDX-License-Identifier: Apache-2.0
"""The Accelerator of an engine, built in this process; launches are in tests/engines."""

import subprocess
import sys
import warnings

import pytest
import torch

from mprecipes.compute.building import build_accelerator
from mprecipes.compute.engines import ENGINES
from mprecipes.compute.precision import MODES
from mprecipes.compute.ranks import Ranks, plan_batches


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_one_process_gets_the_accumulation_and_autocast_it_asked_for(fresh_accelerator, mode):
    """Accumulation 3 of the plan; a product of FP32 matrices in the mode's compute dtype."""
    plan = plan_batches(
        Ranks(rank=0, world_size=1), micro_batch=2, accumulation=3, global_batch=None
    )
    made = build_accelerator(ENGINES["ddp"], MODES[mode], plan, 1.0, False, 60)
    assert (made.num_processes, made.device.type) == (1, "cpu")
    assert made.gradient_accumulation_steps == 3
    with made.autocast():
        product = torch.ones(4, 4) @ torch.ones(4, 4)
    assert product.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[mode]


def test_deepspeed_is_not_imported_for_other_engines():
    """A run that does not use DeepSpeed does not wait for it, nor needs it."""
    code = "import sys, mprecipes.compute.building; print('deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_engines_that_shard_do_not_repeat_torchs_own_warning(fresh_accelerator, name):
    """Two lines in every step would bury what the run says; other warnings are still heard."""
    plan = plan_batches(Ranks(), micro_batch=1, accumulation=1, global_batch=None)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        build_accelerator(ENGINES["fsdp2"], MODES["fp32"], plan, 1.0, False, 60)
        warnings.warn(
            f"`torch.distributed.{name}` is deprecated. Use another.", FutureWarning, stacklevel=1
        )
        warnings.warn("`torch.distributed.other` is deprecated.", FutureWarning, stacklevel=1)
    assert [str(each.message) for each in heard if "torch.distributed" in str(each.message)] == [
        "`torch.distributed.other` is deprecated."
    ]
