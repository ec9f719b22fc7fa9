# SPDX-License-Identifier: Apache-2.0
"""Run folders in the real format, made without a training."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mprecipes.checkpoint import digests, manifest, snapshot, storage
from mprecipes.resume.journal import Journal, StepRecord

FACTS = {
    "recipe": {"name": "stand_in", "version": "1.0.0", "based_on": None, "sha256": "0" * 64},
    "precision": {"mode": "fp32"},
    "topology": {"world_size": 1},
    "data": {"fingerprint": "abcd", "num_sequences": 64},
    "config": {"max_steps": 12, "save_steps": 4},
}


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    """Gives 6 weights, 6 values of each moment and a step that depend on `step` only."""
    values = torch.arange(6.0).reshape(2, 3) * step
    return {
        "weights/layer.weight": values,
        "optimizer/layer.weight/exp_avg": values / 3,
        "optimizer/layer.weight/exp_avg_sq": values * values,
        "optimizer/layer.weight/step": torch.tensor(float(step)),
    }


def write_checkpoint(
    folder: Path, step: int, *, tensors=None, milestone: str | None = None, skipped=()
) -> Path:
    """Publishes a checkpoint of `step` at `folder`."""
    folder.mkdir(parents=True)
    tensors = tensors or tensors_at(step)
    files = storage.put(tensors, folder, rank=0, world_size=1)
    seen = {"samples_seen": 8 * step, "tokens_seen": 504 * step}
    position = {"step": step, "updates": step, "skipped": skipped, **seen}
    values = manifest.build_manifest(
        run_id="0123456789ab", position=position, facts=FACTS, files=files,
        **snapshot.describe_parameters(tensors), state_digests=digests.state_digests(tensors),
        milestone=milestone,
    )  # fmt: skip
    manifest.write_sums(folder, files)
    manifest.write_manifest(folder, values)
    return folder


def record(attempt: int, step: int) -> StepRecord:
    """Gives a journal record that depends on `step` only, its attempt and duration aside."""
    return StepRecord(
        attempt=attempt, step=step, updates=step, samples_seen=8 * step, tokens=504,
        batch_digest=f"{step:016x}", loss=5.0 - step / 16, grad_norm=1.5, learning_rate=1e-3 / step,
        loss_scale=None, skipped=False, step_seconds=0.1 + attempt,
    )  # fmt: skip


def write_run(run: Path, spans: list[tuple[int, int]], saves: list[int]) -> Path:
    """Writes one journal per (first, last) span and a checkpoint per saved step."""
    for attempt, (first, last) in enumerate(spans):
        journal = Journal(run / "journal", attempt, True)
        for step in range(first, last + 1):
            journal.append(record(attempt, step))
        journal.close()
    for step in saves:
        write_checkpoint(run / "checkpoints" / f"step-{step:08d}", step)
    return run


def flip_bit(path: Path) -> None:
    """Flips the lowest bit of the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def folders() -> SimpleNamespace:
    """The makers above."""
    return SimpleNamespace(
        run=write_run, checkpoint=write_checkpoint, tensors=tensors_at, record=record, flip=flip_bit
    )
