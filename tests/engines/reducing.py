# SPDX-License-Identifier: Apache-2.0
"""Launched on two processes: known gradients summed by DDP in each `reduce_dtype`.

    accelerate launch --config_file accelerate_configs/cpu.yaml tests/engines/reducing.py OUT.json

Writes on rank 0 for each dtype the summed gradient, its dtype, and the bytes of one step.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mprecipes.compute.reduction import GradientReduction
from mprecipes.compute.traffic import METRIC, Traffic

COUNT = 1024


def gradient_of(rank: int) -> torch.Tensor:
    """Between 1 and 1.25 at steps of 2^-12, shifted by 2^-11 from rank to rank."""
    return 1 + rank * 2.0**-11 + torch.arange(COUNT) * 2.0**-12


class Given(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(COUNT))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def summed(wanted: str) -> dict[str, object]:
    model = DistributedDataParallel(Given(), gradient_as_bucket_view=True)
    reduction, traffic, bytes_ = GradientReduction(model, wanted), Traffic(2), {}
    for _ in range(4):
        model.zero_grad()
        model(gradient_of(dist.get_rank())).backward()
        traffic.step_ended()
        bytes_ |= traffic.news()
    reduction.verify()
    gradient = model.module.weight.grad
    return {"gradient": gradient.tolist(), "dtype": str(gradient.dtype), "bytes": bytes_[METRIC]}


def main() -> None:
    dist.init_process_group("gloo")
    found = {wanted: summed(wanted) for wanted in ("fp32", "bf16", "fp16")}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
