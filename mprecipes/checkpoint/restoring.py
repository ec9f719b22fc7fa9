# SPDX-License-Identifier: Apache-2.0
"""A checkpoint back into the live state: the newest that verifies, every byte read once.

Candidates are first looked at without reading their tensors (manifest, sizes, `SHA256SUMS`); the
caller may refuse one by its manifest; then its files are verified while they are read into place.
A file that turns out damaged sends the checkpoint to quarantine and the search to the next one,
whose restore overwrites everything. When none is left the live state is NaN and an error is raised.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from mprecipes.checkpoint import snapshot
from mprecipes.checkpoint.abandoned import abandon
from mprecipes.checkpoint.agreement import agree
from mprecipes.checkpoint.contents import doubtful
from mprecipes.checkpoint.fetching import fetch_from_mirror
from mprecipes.checkpoint.fragments import full_tensors
from mprecipes.checkpoint.headers import Header, read_headers
from mprecipes.checkpoint.loading import LoadReport, load, parse_json
from mprecipes.checkpoint.manifest import NAME, Manifest, Problem, verify_folder
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.checkpoint.saving import rank_file
from mprecipes.checkpoint.search import Refusal, by_writer, find_newest, verify_everywhere
from mprecipes.checkpoint.shelf import RunFolderLike, Shelf
from mprecipes.checkpoint.storage import DamagedFile, UnreachableFile
from mprecipes.checkpoint.supply import Wrong
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import VerificationError
from mprecipes.faults import fault_point

log = logging.getLogger(__name__)
_SETTING_ASIDE = ("checkpoints/", "a folder that can be written", "look at the disk, launch again")
_SCALER_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")


class Live(Protocol):
    """What is restored."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer


class Restorer:
    """Finds and restores checkpoints on one rank.

    Attributes:
        refusals: what the last search refused.
        report: of the last restore.
        manifest: of the checkpoint the live state came from; None before.
    """

    def __init__(
        self,
        live: Live,
        folder: RunFolderLike,
        shelf: Shelf,
        ranks: Ranks,
        policy: CheckpointPolicy,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._live, self._folder, self._shelf, self._ranks = live, folder, shelf, ranks
        self._policy, self._scaler = policy, scaler
        self.refusals: list[Refusal] = []
        self.report: LoadReport | None = None
        self.manifest: Manifest | None = None

    def newest_trusted(self) -> Manifest | None:
        """See `CheckpointManager.newest_trusted`."""
        return self._find(lambda manifest: verify_everywhere(manifest.folder, self._ranks)[1])

    def restore(self, manifest: Manifest) -> dict[str, Any]:
        """See `CheckpointManager.restore`."""
        where = manifest.folder.name
        doing = (where, "every rank restores it", "look at the memory and disk, launch again")
        state = agree(self._ranks, doing, lambda: self._restore(manifest))[self._ranks.rank]
        snapshot.refresh_working_copies(self._live.model)
        return state

    def restore_newest(
        self, check: Callable[[Manifest | None], None]
    ) -> tuple[Manifest | None, dict[str, Any]]:
        """See `CheckpointManager.restore_newest`."""
        return self._restore_newest(check)

    def _restore_newest(
        self, check: Callable[[Manifest | None], None], before: int | None = None
    ) -> tuple[Manifest | None, dict[str, Any]]:
        """Likewise; from the mirror only a checkpoint from before a step."""
        state: dict[str, Any] = {}

        def accept(manifest: Manifest) -> Wrong:
            nonlocal state
            check(manifest)
            where = manifest.folder.name
            doing = (where, "every rank restores it", "look at the memory and disk, launch again")
            answers = agree(self._ranks, doing, lambda: self._try(manifest))
            state = answers[self._ranks.rank][0]
            wrong = by_writer(self._ranks, [problems for _, problems in answers])
            if not wrong:
                snapshot.refresh_working_copies(self._live.model)
            return wrong

        manifest = self._find(accept, before)
        if manifest is None:
            check(None)
        self.manifest = manifest
        return manifest, state

    def restore_before(self, step: int, reason: str) -> tuple[Manifest, dict[str, Any]]:
        """See `CheckpointManager.restore_before`."""
        problem = Problem(NAME, reason, f"a step before {step}")

        def set_aside() -> None:
            if not self._ranks.writes_here:
                return
            newer = [each for each in self._shelf.scan()[0] if each.step >= step]
            abandon(self._folder.path, newer, from_step=step)
            for manifest in newer:
                self._shelf.set_aside(manifest.folder, [problem])

        agree(self._ranks, _SETTING_ASIDE, set_aside)
        manifest, state = self._restore_newest(lambda manifest: None, before=step)
        assert manifest is not None  # what was set aside lies in quarantine: none left is an error
        return manifest, state

    def _find(
        self, accept: Callable[[Manifest], Wrong], before: int | None = None
    ) -> Manifest | None:
        def fetch() -> Manifest | None:
            return fetch_from_mirror(self._folder, self._policy, before=before)

        manifest, self.refusals = find_newest(self._shelf, self._ranks, accept, fetch)
        return manifest

    def _try(self, manifest: Manifest) -> tuple[dict[str, Any], list[Problem]]:
        try:
            return self._restore(manifest), []
        except DamagedFile as error:
            path = error.where.rpartition("/")[2]
            names = [entry.path for entry in manifest.files]
            tensors = doubtful(manifest.folder, path, names, manifest.params)
            return {}, [Problem.of(error, path, tensors)]

    def _restore(self, manifest: Manifest) -> dict[str, Any]:
        fault_point("restore.begin", manifest.step)
        headers = read_headers(manifest.folder, manifest.files)
        fault_point("restore.after_headers", manifest.step)
        try:
            self.report = self._load(manifest, headers)
        except DamagedFile:
            raise
        except VerificationError:
            if problems := verify_folder(manifest.folder):  # a damaged header fits nothing either
                first = problems[0]
                kind = UnreachableFile if first.unreachable else DamagedFile
                raise kind(
                    first.found,
                    expected=first.expected,
                    where=f"{manifest.folder.name}/{first.path}",
                    action="do not use this checkpoint; an older one may verify",
                ) from None
            raise
        self._restore_scaler(manifest)
        fault_point("restore.end", manifest.step)
        rank = self._ranks.rank
        for entry in manifest.files:
            if entry.path == rank_file(rank):
                data = self.report.small[entry.path]
                return parse_json(manifest.folder, entry, data)["state"]
        log.warning(
            "step %d was saved by fewer ranks: none of it is rank %d's", manifest.step, rank
        )
        return {}

    def _load(self, manifest: Manifest, headers: list[Header]) -> LoadReport:
        stored = full_tensors(part for header in headers for part in header.tensors.items())
        reports: list[LoadReport] = []

        def fill(into: dict[str, torch.Tensor]) -> None:
            show = self._ranks.is_main
            reports.append(load(manifest.folder, manifest.files, headers, into, show=show))
            fault_point("restore.after_read", manifest.step)

        snapshot.restore_in_place(self._live.model, self._live.optimizer, stored, fill)
        return reports[0]

    def _restore_scaler(self, manifest: Manifest) -> None:
        saved = manifest.raw["scaler"]
        live = (self._scaler.state_dict() or None) if self._scaler is not None else None
        if self._scaler is not None and live and saved:
            settings = {key: live[key] for key in _SCALER_SETTINGS}  # come from the config
            self._scaler.load_state_dict({**live, **saved, **settings})
        elif live or saved:
            had, has = ("one" if each else "none" for each in (saved, live))
            log.warning("loss scaler: %s when step %d was saved, %s now", had, manifest.step, has)
