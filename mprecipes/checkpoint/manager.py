# SPDX-License-Identifier: Apache-2.0
"""When a checkpoint exists and when it can be trusted, agreed on by all ranks.

A save is made in a staging folder by every rank and published by one rename after every byte is on
the disk (on each node, `saving.py`). One that fails or dies anywhere before leaves the ones before
it as they were; deletion comes after publication. What is found again is verified byte by byte on
every rank. No file holds an absolute path.

The training thread only copies its share of the state into host memory that is reused; one
background thread per rank does the rest (`saving.py`) while the training goes on.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mprecipes.checkpoint.aftercare import Aftercare
from mprecipes.checkpoint.capture import Camera
from mprecipes.checkpoint.flight import Flight
from mprecipes.checkpoint.grace import Grace, measure_writing, state_bytes
from mprecipes.checkpoint.loading import LoadReport
from mprecipes.checkpoint.manifest import Manifest, read_manifest
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.checkpoint.pretrained import FILE as PRETRAINED
from mprecipes.checkpoint.pretrained import describe_pretrained
from mprecipes.checkpoint.restoring import Restorer
from mprecipes.checkpoint.saving import Saver, SaveReport
from mprecipes.checkpoint.schedule import SaveSchedule
from mprecipes.checkpoint.search import Refusal
from mprecipes.checkpoint.shelf import RunFolderLike, Shelf
from mprecipes.checkpoint.snapshot import live_tensors
from mprecipes.checkpoint.storage import encode_json
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position
from mprecipes.faults import fault_point

SAVE_FILE = "SAVE"


class CheckpointManager:
    """Saves, finds and restores the checkpoints of one run; a context manager that drains.

    Collective: every rank makes one, in the same order, since it has a process group of its own.

    Args:
        folder: the run's folder.
        ranks: this process among its peers.
        model: bare or wrapped by DDP, `torch.compile` or `Accelerator.prepare`.
        optimizer: likewise; its hyperparameters are not saved.
        policy: when to save, what to keep, what to do when a save fails.
        scaler: loss scaler, None without one; its scale and growth counter are saved.
        device: where the state lives; on CUDA the host buffers are page-locked.
        tokenizer_dir: kept in every checkpoint with the model's config, so that it can be exported.
        clock: monotonic seconds, for `save_minutes`.

    Attributes:
        model, optimizer, scaler: as given; `snapshot.live_tensors` reads through their wrappers.
        protected: steps that retention leaves alone.
        on_published: given each published checkpoint's name, in the background, where it writes.
    """

    def __init__(
        self,
        folder: RunFolderLike,
        ranks: Ranks,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        policy: CheckpointPolicy | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        device: torch.device | str = "cpu",
        tokenizer_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self._policy = policy or CheckpointPolicy()
        self._shelf = Shelf(folder.checkpoints, folder.quarantine, folder.run_id)
        beside: dict[str, bytes] = {}
        if tokenizer_dir is not None and ranks.is_main:
            pretrained = describe_pretrained(model, tokenizer_dir)
            beside = {PRETRAINED: encode_json(pretrained)} if pretrained is not None else {}
        self._saver = Saver(self._shelf, ranks.with_own_group(), folder.run_id, beside)
        mine, writes = self._policy.on_node(ranks.is_main), ranks.writes_here
        self._aftercare = Aftercare(folder, mine, folder.run_id) if writes else None
        self.protected: set[int] = self._aftercare.protected if self._aftercare else set()
        self.on_published: Callable[[str], None] = lambda name: None
        self._restorer = Restorer(self, folder, self._shelf, ranks, self._policy, scaler)
        save_file = folder.path / SAVE_FILE
        self._schedule = SaveSchedule(self._policy, save_file, writes_here=writes, clock=clock)
        self._grace, self._folder = Grace(self._policy, clock), folder
        self._camera = Camera(ranks, pin=torch.device(device).type == "cuda")
        self._flight, self._reserved = Flight(self._policy, self._grace), threading.Event()
        self._reserved.set()
        self._has_reserved = False

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain_mirror=kind is None)

    @property
    def counts(self) -> Counter[str]:
        """What happened so far, by name.

        `saves`, `kept_saves` (the step was there and good), `failed_saves`, `waits` (a save began
        while the one before was in flight), `quarantined`, and those of `Aftercare`.
        """
        self._flight.collect()
        total = self._flight.counts + self._shelf.counts
        return total + self._aftercare.counts if self._aftercare else total

    @property
    def last_save(self) -> SaveReport | None:
        """The newest save that ended, None before the first."""
        self._flight.collect()
        return self._flight.last

    @property
    def refusals(self) -> list[Refusal]:
        """What the last search refused."""
        return self._restorer.refusals

    @property
    def restored(self) -> Manifest | None:
        """Of the checkpoint the live state came from; None when there was none."""
        return self._restorer.manifest

    @property
    def last_load(self) -> LoadReport | None:
        """The newest restore, None before the first."""
        return self._restorer.report

    @property
    def must_stop(self) -> bool:
        """True when a save failed and the run should not go on: its policy, or broken state."""
        self._flight.collect()
        return self._flight.fatal is not None

    def wants_save(self, step: int) -> bool:
        """Whether this rank wants a save after this step: its number, the time, or a SAVE file.

        Time and file count on rank 0; the file is looked for at most once a second, and removed
        when the save begins. Ranks agree in the step's own reduction.
        """
        if not self._has_reserved and self.optimizer.state:
            self._has_reserved = True  # memory for the copies is taken beside the training
            live = live_tensors(self.model, self.optimizer)
            self._reserved.clear()
            self._flight.follow(lambda: self._reserve(live))
        self._grace.looked()
        return self._schedule.is_due(step)

    def save(
        self,
        position: Position,
        facts: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        *,
        milestone: str | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
    ) -> None:
        """Collective: begins to save the live state as the checkpoint of a step.

        Blocks until the state is copied, and before that until the save before is published. What
        becomes of it is told by `finished`, `must_stop` and the next call. A step that is published
        already and verifies is kept as it is.

        Args:
            position: the counters after the step.
            facts: the manifest's `recipe`, `precision`, `topology`, `data`, `environment`,
                `config`, `probe`, `throughput`; JSON values, rank 0's count.
            rank_state: what this rank alone must find again, such as random states; JSON values.
            milestone: name under which this checkpoint is also kept for good.
            metrics: measured at this step, for the manifest and `keep_best`.
            wait: block until it is published and what follows is done, and raise if it failed.

        Raises:
            NumericsError: the state holds NaN or infinity, or replicas differ; on every rank.
            CheckpointError: some rank could not write; on every rank. After either, nothing was
                published, older checkpoints are untouched, and a later save may succeed.
                Without `wait` it is the save before that failed, and the policy says stop.
        """
        began = time.monotonic()
        self._flight.land()
        if self._flight.fatal is not None:
            raise self._flight.told(self._flight.fatal)
        self._reserved.wait()
        waited = time.monotonic() - began
        finite = {name: x for name, x in (metrics or {}).items() if math.isfinite(x)}
        capture = self._camera(
            self.model,
            self.optimizer,
            self.scaler,
            position,
            facts={**facts, "metrics": finite},
            rank_state=rank_state,
            milestone=milestone,
        )
        self._has_reserved = True
        fault_point("save.after_copy", position.step)
        save = self._flight.begin(lambda: self._saver(capture))
        self._flight.follow(lambda: self._attend(save.result()[0], milestone, dict(metrics or {})))
        self._schedule.begun()
        self._flight.blocked(time.monotonic() - began, waited)
        if wait or self._policy.synchronous:
            save.result()
            self._flight.blocked(time.monotonic() - began, waited)
            self.wait()
        if wait and self._flight.failure is not None:
            raise self._flight.told(self._flight.failure)

    def finished(self) -> list[SaveReport]:
        """Gives the saves that ended since the last call, failed ones too; never blocks."""
        return self._flight.ended()

    def wait(self) -> None:
        """Returns when no save, and nothing that follows one, is in flight."""
        self._flight.settle()

    def close(self, *, drain_mirror: bool = True) -> None:
        """Waits for the save in flight and ends the threads; every exit path calls it.

        Args:
            drain_mirror: also wait until the mirror is up to date.
        """
        self._flight.close()
        if self._aftercare is not None:
            self._aftercare.close(drain=drain_mirror)

    def candidates(self) -> list[int]:
        """Gives the steps of the published checkpoints, by their manifests, newest first."""
        return sorted({manifest.step for manifest in self._shelf.scan()[0]}, reverse=True)

    def newest_trusted(self) -> Manifest | None:
        """Collective: gives the newest checkpoint of which every byte verifies on every rank.

        On disk afterwards: what did not verify on the way lies in `quarantine/`; see `refusals`.
        None when there never was a checkpoint.

        Raises:
            NoTrustedCheckpoint: there are, or were, checkpoints and none verifies; on every rank.
        """
        return self._restorer.newest_trusted()

    def restore(self, manifest: Manifest) -> dict[str, Any]:
        """Collective: makes the live state the saved one and gives this rank's `rank_state`.

        {} on a rank that the saving launch did not have. Every file is verified as it is read.

        Raises:
            VerificationError: on every rank. Names, shapes or dtypes do not fit: nothing was
                changed. A file is damaged: the live state is NaN, and only a restore of another
                checkpoint makes it useful again.
        """
        return self._restorer.restore(manifest)

    def restore_newest(
        self, check: Callable[[Manifest | None], None]
    ) -> tuple[Manifest | None, dict[str, Any]]:
        """Collective: restores the newest checkpoint that verifies, every byte read once.

        Args:
            check: collective; called with each candidate before live state is touched, and with
                None when there never was one. What it raises ends the search.

        Raises:
            NoTrustedCheckpoint: there are, or were, checkpoints and none verifies; on every rank.
            VerificationError: a checkpoint that verifies does not fit the live state.
        """
        return self._restorer.restore_newest(check)

    def restore_before(self, step: int, reason: str) -> tuple[Manifest, dict[str, Any]]:
        """Collective: restores the newest checkpoint that verifies from before a step.

        On disk afterwards: those of `step` and later lie in `quarantine/` with the reason.

        Raises:
            NoTrustedCheckpoint: none from before verifies; on every rank.
        """
        self.wait()
        return self._restorer.restore_before(step, reason)

    def keep_before(self, step: int | None) -> None:
        """Keeps the newest checkpoint from before this step, whatever its age; None lets it go."""
        if self._aftercare is not None:
            self._aftercare.keep_before = step

    def stop_takes(self) -> str | None:
        """Gives a line on how long a stop will take; blocks for writing up to 32 MiB to measure."""
        size = state_bytes(live_tensors(self.model, self.optimizer))
        rate = measure_writing(self._folder.path, size)
        return None if rate is None else self._grace.predicted(size, rate)

    def freeze_retention(self) -> None:
        """Deletes nothing from here on, until `release_retention`."""
        if self._aftercare is not None:
            self._aftercare.freeze()

    def release_retention(self) -> None:
        """Lets retention run again, and runs it in the background."""
        if self._aftercare is not None:
            self._flight.follow(self._aftercare.release)

    def sweep(self) -> None:
        """Removes what a dead process left half written or deleted; call it under the lease."""
        if self._aftercare is not None:
            self._shelf.sweep()
            self._aftercare.sweep()

    def _reserve(self, live: Mapping[str, torch.Tensor]) -> None:
        try:
            self._camera.reserve(live)
        finally:
            self._reserved.set()

    def _attend(
        self, report: SaveReport, milestone: str | None, metrics: Mapping[str, float]
    ) -> None:
        """What comes after a save has been published, where this rank writes."""
        if self._aftercare is not None and report.path is not None:
            self.on_published(report.path.name)
            self._aftercare.published(read_manifest(report.path), milestone, metrics)
