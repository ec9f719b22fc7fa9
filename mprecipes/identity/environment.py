# SPDX-License-Identifier: Apache-2.0
"""What a run was computed with: versions, processor, devices, driver, commit of the recipe.

Holds nothing that names a person or a place: no host name, no path, no address.
"""

import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "accelerate",
    "transformers",
    "datasets",
    "safetensors",
    "deepspeed",
    "numpy",
    "tokenizers",
    "torchao",
    "mprecipes",
)


@dataclass(frozen=True)
class Change:
    """One field of two environments that differ; None means absent."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.old} -> {self.new}"


def describe_environment(repository: Path | None = None) -> dict[str, Any]:
    """Gives a flat JSON-safe description of software and hardware; None where something is absent.

    Args:
        repository: the recipe file or a folder of its git repository, whose commit is recorded
            (wherever the process runs); None records none.
    """
    import torch  # slow: only needed here

    cuda = torch.cuda.is_available()
    facts: dict[str, Any] = {"python": platform.python_version()}
    facts.update({name: _version(name) for name in PACKAGES})
    facts["platform"] = platform.platform()
    facts["cpu_model"] = _cpu_model()
    facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    facts["num_threads"] = torch.get_num_threads()
    facts["cuda"] = torch.version.cuda
    facts["cudnn"] = torch.backends.cudnn.version() if cuda else None
    facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if cuda else None
    facts["driver"] = _driver() if cuda else None
    facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    commit, status = None, None
    if repository is not None:
        commit = _git(repository, "rev-parse", "HEAD")
        status = _git(repository, "status", "--porcelain", "--untracked-files=no")
    facts["git_commit"] = commit
    facts["git_dirty"] = None if status is None or commit is None else status != ""
    return facts


def compare_environment(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Gives every field whose value differs, in the order of the new environment."""
    fields = [*new, *(field for field in old if field not in new)]
    pairs = ((field, old.get(field), new.get(field)) for field in fields)
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or None


def _driver() -> str | None:
    """Gives the NVIDIA driver's version; the tool that tells it comes with the driver."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    text = _output([tool, "--query-gpu=driver_version", "--format=csv,noheader"])
    return text.splitlines()[0].strip() if text else None


def _git(place: Path, *command: str) -> str | None:
    folder = place if place.is_dir() else place.parent
    return _output(["git", "-C", str(folder.resolve()), *command])


def _output(command: list[str]) -> str | None:
    """Gives what a command prints, None where it is missing, fails or takes over 20 seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
