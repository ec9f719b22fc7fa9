# SPDX-License-Identifier: Apache-2.0
"""Facts of a small launch, and step records that differ only where a test says so."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mprecipes.checkpoint.manager import CheckpointManager
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position
from mprecipes.resume.journal import StepRecord

CLASSES = {
    "dataset": "may_change",
    "seq_length": "may_change",
    "per_device_train_batch_size": "may_change",
    "gradient_accumulation_steps": "free",
    "precision": "may_change",
    "seed": "may_change",
    "learning_rate": "may_change",
    "weight_decay": "may_change",
    "torch_compile": "may_change",
    "model_config": "must_match",
    "save_steps": "free",
}
FACTS: dict[str, Any] = {
    "recipe": {"name": "tiny", "version": "1.0.0", "sha256": "aa"},
    "precision": {"mode": "fp32"},
    "topology": {"world_size": 2, "device": "cpu"},
    "data": {
        "fingerprint": "f00d",
        "num_sequences": 64,
        "seed": 1,
        "global_batch": 8,
        "micro_batch": 4,
    },
    "environment": {"torch": "2.13.0", "git_commit": "abc"},
    "config": {
        "dataset": "a.txt",
        "seq_length": 16,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "precision": "auto",
        "seed": 1,
        "learning_rate": 0.001,
        "weight_decay": 0.1,
        "torch_compile": False,
        "model_config": {"hidden_size": 32},
        "save_steps": 2,
    },
}


@pytest.fixture
def classes() -> dict[str, str]:
    return dict(CLASSES)


@pytest.fixture
def facts() -> Callable[..., dict[str, Any]]:
    """Gives the facts with changes such as `data__seed=2`."""

    def make(**changes: Any) -> dict[str, Any]:
        made = copy.deepcopy(FACTS)
        for path, value in changes.items():
            group, key = path.split("__")
            made[group][key] = value
        return made

    return make


@pytest.fixture
def record() -> Callable[..., StepRecord]:
    def make(step: int = 6, attempt: int = 0, **changes: Any) -> StepRecord:
        values: dict[str, Any] = {
            "attempt": attempt,
            "step": step,
            "updates": step,
            "samples_seen": 8 * step,
            "tokens": 120,
            "batch_digest": f"{step:016x}",
            "loss": 4.0 - step / 16,
            "grad_norm": 0.1,
            "learning_rate": 0.001,
            "loss_scale": None,
            "skipped": False,
            "step_seconds": 0.5,
        }
        return StepRecord(**{**values, **changes})

    return make


@dataclass
class Run:
    """A run folder without lease and source: the paths, and the attempts noted in run.json."""

    path: Path
    attempt: int
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

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def resume_reports(self) -> Path:
        return self.path / "resume"

    def attempts(self) -> list[dict[str, Any]]:
        path = self.path / "run.json"
        return json.loads(path.read_text())["attempts"] if path.exists() else []

    def record(self, **noted: Any) -> None:
        attempts = [*self.attempts(), {"attempt": self.attempt, **noted}]
        (self.path / "run.json").write_text(json.dumps({"attempts": attempts}))

    def report(self) -> dict[str, Any]:
        path = self.resume_reports / f"attempt-{self.attempt:04d}.json"
        return json.loads(path.read_text())

    def checks(self) -> dict[str, dict[str, Any]]:
        return {check["name"]: check for check in self.report()["checks"]}


@pytest.fixture
def run(tmp_path: Path) -> Callable[[int], Run]:
    """Gives the run folder as attempt number n sees it."""
    return lambda attempt: Run(tmp_path, attempt)


@dataclass
class State:
    """A model and its optimizer, at their initial values until trained or restored."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 3)).square().sum().backward()
            self.optimizer.step()

    def weights(self) -> list[float]:
        return [value for p in self.model.parameters() for value in p.detach().reshape(-1).tolist()]

    def manager(
        self, run: Run, ranks: Ranks | None = None, kind: type = CheckpointManager
    ) -> CheckpointManager:
        return kind(
            folder=run,
            ranks=ranks or Ranks(),
            model=self.model,
            optimizer=self.optimizer,
            policy=CheckpointPolicy(keep_last=1),
        )


@pytest.fixture
def state() -> Callable[[], State]:
    def make() -> State:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 2)
        return State(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    return make


@pytest.fixture
def save(facts: Callable[..., dict[str, Any]]) -> Callable[..., Path]:
    """Publishes a checkpoint of a step, 8 samples and 120 tokens a step."""

    def publish(manager: CheckpointManager, step: int) -> Path:
        position = Position(step, step, 8 * step, 120 * step)
        manager.save(position, facts=facts(), rank_state={"step": step}, wait=True)
        assert manager.last_save is not None and manager.last_save.path is not None
        return manager.last_save.path

    return publish
