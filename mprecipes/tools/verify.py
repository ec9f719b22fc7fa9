# SPDX-License-Identifier: Apache-2.0
"""Says of each checkpoint whether its bytes are the ones its manifest promises.

Reads only: nothing is moved to quarantine and nothing is loaded. What `mprecipes verify` prints.
"""

import contextlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mprecipes.checkpoint import manifest as manifests
from mprecipes.errors import ConfigError, VerificationError

MARKS = ("manifest.json", "SHA256SUMS")


@dataclass(frozen=True)
class Verdict:
    """What was found about one checkpoint.

    Attributes:
        path: its folder.
        kind: "checkpoint", "milestone" or one of `scrub.Finding`.
        step: from its manifest; None when that cannot be read.
        problems: what does not agree, empty when everything does.
        url: where it is, at a mirror.
    """

    path: Path
    kind: str
    step: int | None
    num_files: int
    num_bytes: int
    seconds: float
    problems: list[manifests.Problem]
    url: str = ""

    @property
    def place(self) -> str:
        return self.url or str(self.path)

    @property
    def verifies(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        problems = [asdict(problem) for problem in self.problems]
        return {
            "path": self.place,
            "kind": self.kind,
            "step": self.step,
            "verifies": self.verifies,
            "num_files": self.num_files,
            "num_bytes": self.num_bytes,
            "seconds": round(self.seconds, 3),
            "problems": problems,
        }


def is_checkpoint(path: Path) -> bool:
    """A folder that holds, or clearly held, a checkpoint."""
    return any((path / mark).exists() for mark in MARKS) or any(path.glob("*.safetensors"))


def checkpoints_of(path: Path) -> list[tuple[str, Path]]:
    """Gives (kind, folder) of what a path names: one checkpoint, or all of a run, newest first.

    Order is by the step in each manifest; a folder whose manifest cannot be read comes first.

    Raises:
        ConfigError: the path is neither a checkpoint nor a run folder.
    """
    if not path.is_dir():
        raise ConfigError(
            "a file" if path.exists() else "no such folder",
            expected="the folder of a checkpoint or of a run",
            where=str(path),
            action="name a run's output_dir, or one folder under its checkpoints/",
        )
    if (path / "run.json").exists() or (path / "checkpoints").is_dir():
        folders = [
            (kind, folder)
            for kind, parent in (("checkpoint", "checkpoints"), ("milestone", "milestones"))
            for folder in sorted((path / parent).glob("[!.]*"))
            if folder.is_dir()
        ]
        return sorted(folders, key=lambda item: -_step_of(item[1]))
    if is_checkpoint(path):
        return [("milestone" if path.parent.name == "milestones" else "checkpoint", path)]
    raise ConfigError(
        "a folder with neither run.json nor manifest.json",
        expected="the folder of a checkpoint or of a run",
        where=str(path),
        action="name a run's output_dir, or one folder under its checkpoints/",
    )


def _step_of(folder: Path) -> float:
    try:
        return manifests.read_manifest(folder).step
    except VerificationError:
        return float("inf")  # shown, and so reported, rather than passed over


def newest_checkpoint(run: Path) -> Path | None:
    """Gives the published checkpoint with the highest step in its manifest, verified or not."""
    folders = [path for path in (run / "checkpoints").glob("[!.]*") if path.is_dir()]
    return max(folders, key=_step_of, default=None)


def verify_checkpoint(folder: Path, kind: str = "checkpoint") -> Verdict:
    """Reads every byte of one checkpoint and compares it with the manifest; blocks."""
    started = time.monotonic()
    problems = manifests.verify_folder(folder)
    step: int | None = None
    with contextlib.suppress(VerificationError):  # `problems` already says so
        step = manifests.read_manifest(folder).step
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    seconds = time.monotonic() - started
    return Verdict(folder, kind, step, len(sizes), sum(sizes), seconds, problems)


def verify_path(path: Path) -> list[Verdict]:
    """Verifies the checkpoint, or every checkpoint and milestone of the run, that a path names.

    Raises:
        ConfigError: the path is neither.
    """
    return [verify_checkpoint(folder, kind) for kind, folder in checkpoints_of(path)]
