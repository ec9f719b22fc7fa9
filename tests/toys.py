# SPDX-License-Identifier: Apache-2.0
"""A run folder, a model with every corner a checkpoint must know, and a step that trains it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mprecipes.checkpoint.manager import CheckpointManager
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position

FACTS = {
    "recipe": {"name": "toy", "version": "1.0.0"},
    "config": {"learning_rate": 0.01},
    "data": {"fingerprint": "f" * 16, "seed": 7},
}


@dataclass(frozen=True)
class Folder:
    """The parts of a run folder that a manager needs."""

    path: Path
    run_id: str = "0123456789ab"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    @property
    def milestones(self) -> Path:
        return self.path / "milestones"


class Toy(nn.Module):
    """Tied, half-width, empty and never updated parameters; buffers of several kinds."""

    def __init__(self, seed: int = 0, *, width: int = 4, num_layers: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(8, width)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
        self.head = nn.Linear(width, 8, bias=False)
        self.head.weight = self.embed.weight
        self.narrow = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.idle = nn.Parameter(torch.randn(2, 2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return (
            self.head(self.layers(self.embed(ids))) + self.narrow.float().sum() + self.empty.sum()
        )


def toy(seed: int = 0, **sizes: int) -> tuple[Toy, torch.optim.Optimizer]:
    model = Toy(seed, **sizes)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One optimizer step on data that are a function of the step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 8, (2, 5), generator=generator)
    optimizer.zero_grad()
    model(ids).square().mean().backward()
    optimizer.step()


class Run:
    """A toy run in one process: model, optimizer and manager on a folder."""

    def __init__(
        self,
        path: Path,
        *,
        seed: int = 0,
        keep_last: int = 3,
        ranks: Ranks | None = None,
        policy: CheckpointPolicy | None = None,
        **sizes: int,
    ) -> None:
        self.folder = Folder(path)
        self.model, self.optimizer = toy(seed, **sizes)
        self.manager = CheckpointManager(
            folder=self.folder,
            ranks=ranks or Ranks(),
            model=self.model,
            optimizer=self.optimizer,
            policy=policy or CheckpointPolicy(keep_last=keep_last),
        )

    def train(self, steps: Iterable[int], *, save: bool = True, wait: bool = True) -> None:
        for step in steps:
            train_step(self.model, self.optimizer, step)
            if save:
                self.save(step, wait=wait)

    def save(self, step: int, milestone: str | None = None, *, wait: bool = True) -> Path:
        """Gives the folder; with `wait` it is published, or the save has raised."""
        state = {"draws": step}
        self.manager.save(
            self.position(step), facts=FACTS, rank_state=state, milestone=milestone, wait=wait
        )
        return self.folder.checkpoints / f"step-{step:08d}"

    @staticmethod
    def position(step: int) -> Position:
        return Position(step=step, updates=step, samples_seen=2 * step, tokens_seen=10 * step)

    def names(self) -> list[str]:
        """All names in the checkpoints folder, hidden ones included."""
        return sorted(path.name for path in self.folder.checkpoints.iterdir())
