# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints in the real format, made without a training, and ways to damage them."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from mprecipes.checkpoint import manifest as manifests
from mprecipes.checkpoint.manifest import Manifest
from mprecipes.checkpoint.storage import FileEntry

TENSORS, RANK = "tensors-rank00000-000.safetensors", "rank-00000.json"
RUN_ID = "0123456789ab"


@dataclass(frozen=True)
class Folder:
    """The parts of a run folder that keeping checkpoints needs."""

    path: Path
    run_id: str = RUN_ID

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    @property
    def milestones(self) -> Path:
        return self.path / "milestones"

    def save(self, *steps: int, milestone: str | None = None) -> Manifest:
        """Publishes a checkpoint of each step; gives the last one's manifest."""
        for step in steps:
            target = self.checkpoints / f"step-{step:08d}"
            found = write_checkpoint(target, step, milestone=milestone, run_id=self.run_id)
        return found

    def steps(self, kind: str = "checkpoints") -> list[int]:
        """The steps of all folders of a kind that verify, sorted; fails on one that does not."""
        found = []
        for path in (self.path / kind).glob("[!.]*"):
            if path.is_dir():
                assert manifests.verify_folder(path) == []
                found.append(manifests.read_manifest(path).step)
        return sorted(found)


def write_checkpoint(
    folder: Path,
    step: int,
    *,
    milestone: str | None = None,
    run_id: str = RUN_ID,
    salt: float = 1,
    **more: object,
) -> Manifest:
    """Publishes a checkpoint of one tensor file and a rank file; `more` are further facts."""
    folder.mkdir(parents=True)
    values = torch.arange(6.0).reshape(2, 3) * step * salt
    tensors = {"weights/layer.weight": values, "optimizer/layer.weight/exp_avg": values / 3}
    safetensors.torch.save_file(tensors, folder / TENSORS)
    (folder / RANK).write_text('{"rank": 0, "state": {}}\n')
    files = []
    for name in (TENSORS, RANK):
        data = (folder / name).read_bytes()
        files.append(FileEntry(name, len(data), hashlib.sha256(data).hexdigest(), 0))
    facts = manifests.build_manifest(
        run_id=run_id, position=dict.fromkeys(manifests.COUNTERS, step), facts=more, files=files,
        params={"layer.weight": "float32"}, shapes={"layer.weight": [2, 3]},
        state_digests={"weights": "0" * 16}, milestone=milestone,
    )  # fmt: skip
    manifests.write_sums(folder, files)
    manifests.write_manifest(folder, facts)
    return manifests.read_manifest(folder)


def flip(path: Path) -> None:
    """Flips the lowest bit of the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kept(decisions: Iterable) -> list[int]:
    """The steps that a plan keeps."""
    return [each.step for each in decisions if each.keep]
