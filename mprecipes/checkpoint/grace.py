# SPDX-License-Identifier: Apache-2.0
"""How long a stop takes, beside the time that whoever asks for it will wait."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from mprecipes.checkpoint.policy import CheckpointPolicy

# Source: torch/distributed/elastic/multiprocessing/api.py, PContext.close(timeout=30)
LAUNCHER_SECONDS = 30.0
PROBE_BYTES = 32 << 20


class Grace:
    """Predicts, then measures, the time from a request to stop until its save is published.

    A request is seen when the step or evaluation in progress ends; then a save in flight is waited
    for, and then comes its own.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, policy: CheckpointPolicy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._given, self._clock = policy.preemption_grace_seconds, clock
        self._looked_at: float | None = None
        self._longest_step, self._longest_save = 0.0, 0.0
        self._told = self._warned = False

    def looked(self) -> None:
        """The flag was read: once a step."""
        now = self._clock()
        if self._looked_at is not None:
            self._longest_step = max(self._longest_step, now - self._looked_at)
        self._looked_at = now

    def predicted(self, num_bytes: int, bytes_per_second: float) -> str:
        """Gives what to tell before anything was saved."""
        seconds = 2 * num_bytes / bytes_per_second
        about = f"{num_bytes / 1e6:,.1f} MB at {bytes_per_second / 1e6:,.0f} MB/s, measured here"
        text = f"a stop needs about {seconds:.1f} s, for a save and one in flight: {about}"
        return text + self._warning(seconds)

    def measured(self, seconds: float) -> str | None:
        """Gives what to tell after a save: after the first, and when it becomes too long."""
        self._longest_save = max(self._longest_save, seconds)
        needed = self._longest_step + 2 * self._longest_save
        warning = "" if self._warned else self._warning(needed)
        if self._told and not warning:
            return None
        self._told = True
        return (
            f"a stop needs up to {needed:.1f} s: a step or evaluation of {self._longest_step:.1f} "
            f"s, a save in flight and its own of {self._longest_save:.1f} s each{warning}"
        )

    def _warning(self, needed: float) -> str:
        limit = LAUNCHER_SECONDS if self._given is None else self._given
        if needed <= limit:
            return ""
        self._warned = True
        if self._given is None:
            return (
                f"\n  WARNING: a launcher that is sent SIGTERM kills the ranks after {limit:g} s: "
                "send SIGUSR1 to a rank, early enough (docs/slurm.md)"
            )
        return (
            f"\n  WARNING: preemption_grace_seconds is {limit:g}: ask earlier, evaluate less at a "
            "time, or save to a faster disk; a stop that is cut off costs the steps since the "
            "last save"
        )


def state_bytes(live: Mapping[str, torch.Tensor]) -> int:
    """Gives the size of a checkpoint; before the first update that of AdamW's is added."""
    size = sum(tensor.nbytes for tensor in live.values())
    if any(name.startswith("optimizer/") for name in live):
        return size
    return size + sum(2 * tensor.nbytes for tensor in live.values() if tensor.is_floating_point())


def measure_writing(folder: Path, num_bytes: int) -> float | None:
    """Gives the bytes per second of a durable write in a folder; None when it cannot be written.

    Blocks for writing so many bytes, 32 MiB at most.
    """
    path = folder / f".bandwidth.{os.getpid()}.tmp"
    data = os.urandom(1 << 20)  # a disk that compresses is not flattered
    count = max(1, min(num_bytes, PROBE_BYTES) >> 20)
    began = time.monotonic()
    try:
        with open(path, "xb", buffering=0) as file:
            for _ in range(count):
                file.write(data)
            os.fdatasync(file.fileno())
        return count * len(data) / max(time.monotonic() - began, 1e-6)
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
