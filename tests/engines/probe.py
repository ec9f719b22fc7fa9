# SPDX-License-Identifier: Apache-2.0
"""Launched: one parameter of two elements on a real engine, and what single updates do to it.

    accelerate launch --config_file CONFIG tests/engines/probe.py OUT.json CLIPPING

Writes, on rank 0: what 1024 micro-batches of gradient 1 add up to, how far a gradient (3, 4) moves
the parameter, and what a gradient that is not finite does; before, a gradient is
dropped without a trace.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import mprecipes as mp
from mprecipes.checkpoint.fragments import fragment_of, name_of
from mprecipes.checkpoint.snapshot import live_tensors, stale_working_copies
from mprecipes.errors import NumericsError

ACCUMULATION = 1024


@dataclass
class Config:
    max_grad_norm: float | None
    output_dir: str
    numerics: dict[str, object] | None = None
    precision: str = "auto"
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int | None = ACCUMULATION
    global_batch_size: int | None = None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


class Probe:
    def __init__(self, launch: mp.Launch, clipping: float | None) -> None:
        self.launch, self.accelerator = launch, launch.accelerator
        self.clipping = clipping or math.inf
        model = Two()
        prepared = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        self.model, self.optimizer = prepared
        launch.check_masters(self.model)

    def masters(self) -> list[float]:
        """The whole FP32 parameter, from all ranks' fragments."""
        whole = [0.0, 0.0]
        live = live_tensors(self.model, self.optimizer)
        mine = {key: (part.tolist(), str(part.dtype)) for key, part in live.items()}
        for parts in self.launch.ranks.gather(mine):
            for key, (values, dtype) in parts.items():
                if name_of(key) == "weights/weight":
                    assert dtype == "torch.float32", dtype
                    start = fragment_of(key, torch.zeros(len(values))).start
                    whole[start : start + len(values)] = values
        return whole

    def update(self, x: tuple[float, float]) -> tuple[float, list[float]]:
        """One optimizer step of ACCUMULATION equal micro-batches: norm, and the movement."""
        before, batch = self.masters(), torch.tensor(x)
        meter = mp.StepMeter(self.launch.ranks)
        for number in range(ACCUMULATION):
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch)
                self.accelerator.backward(loss)
            if number == 0:
                tokens = torch.zeros(1, 2, dtype=torch.int64)
                meter.add(0, {"input_ids": tokens, "labels": tokens}, loss.float())
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clipping)
        seen = meter.reduce(1, num_targets=1, grad_norm=norm, stop=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        after = self.masters()
        return seen.grad_norm, [old - new for old, new in zip(before, after, strict=True)]

    def drop(self, x: tuple[float, float]) -> None:
        """A forward and backward whose gradient is dropped, as a recipe's probe does."""
        before = self.masters()
        self.accelerator.backward(self.model(torch.tensor(x)))
        self.optimizer.zero_grad()
        assert self.masters() == before


def main() -> None:
    out, clipping = Path(sys.argv[1]), None if sys.argv[2] == "none" else float(sys.argv[2])
    with mp.start(Config(clipping, str(out.parent)), {"precision": "default"}) as launch:
        probe = Probe(launch, clipping)
        found = {"ones": probe.update((1.0, 0.0))}
        probe.drop((7.0, 7.0))
        found["three_four"] = probe.update((3.0, 4.0))
        found["stale"] = launch.ranks.gather(stale_working_copies(probe.model))
        before = probe.masters()
        try:
            probe.update((math.nan, 1.0))
        except NumericsError as error:
            found["refused"] = str(error)
        found["untouched"] = probe.masters() == before
        found["topology"] = launch.measured["topology"]
        if launch.is_main:
            out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
