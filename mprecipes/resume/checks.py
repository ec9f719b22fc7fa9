# SPDX-License-Identifier: Apache-2.0
"""The resume report: what was checked, what was found, and what it means.

On disk: `resume/attempt-0001.json`, written when the attempt starts and again when the verdict is
known: `verdict` (`on_probation`, then `released`, `released_with_warnings` or `halted`), `attempt`,
`checkpoint`, `step`, `base`, `environment_changes`, `contract_changes`, `torn_journal_lines`,
`checks`, `replayed_steps`, `observed_steps`. docs/resume.md has every key.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from mprecipes.checkpoint.digests import add_digests, state_digests
from mprecipes.checkpoint.fragments import owned, replicated
from mprecipes.checkpoint.loading import LoadReport
from mprecipes.checkpoint.manifest import Manifest
from mprecipes.checkpoint.search import Refusal
from mprecipes.checkpoint.snapshot import live_tensors, stale_working_copies
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import ResumeHalted
from mprecipes.identity.files import write_json_atomically


@dataclass
class Check:
    """One row of the report.

    `verdict` is `pending`, then `passed`, `warned`, `failed`, or `not_judged` where there was
    nothing to compare. Of the five checks `expected`, `found` and `tolerance` are dicts by fact.
    """

    name: str
    verdict: str
    policy: str
    expected: Any
    found: Any
    tolerance: Any
    seconds: float
    meaning: str


@dataclass(frozen=True)
class Report:
    """The resume report; without a path (other ranks, first attempts) it is not written."""

    path: Path | None
    facts: Mapping[str, Any]
    checks: list[Check]

    def write(self, verdict: str, replayed_steps: int = 0, observed_steps: int = 0) -> None:
        """Replaces the file; blocks for its fsync."""
        if self.path is None:
            return
        self.path.parent.mkdir(exist_ok=True)
        checks = [asdict(check) for check in self.checks]
        report = {"verdict": verdict, **self.facts, "checks": checks}
        counts = {"replayed_steps": replayed_steps, "observed_steps": observed_steps}
        write_json_atomically(self.path, {**report, **counts})


def bytes_check(
    manifest: Manifest | None, refusals: list[Refusal], load: LoadReport | None, seconds: float
) -> Check:
    """Gives what was read, how fast, and which newer checkpoints were refused on the way.

    `restart_seconds` is from the start of this process until the state was in place;
    `predicted_restart_seconds` is what it was said to take when a sixteenth had been read: the time
    until then, and the bytes divided by the bandwidth measured on them.

    Args:
        load: how long reading took; None without a checkpoint.
        seconds: of the whole search and restore.
    """
    found: Any = "no checkpoint was published yet: started at step 0"
    if manifest is not None and load is not None:
        restart = time.time() - psutil.Process().create_time()
        found = {
            "files": len(manifest.files),
            "bytes": load.num_bytes,
            "quarantined": [refusal.quarantined_as or refusal.name for refusal in refusals],
            "load_seconds": round(load.seconds, 3),
            "bytes_per_second": round(load.bytes_per_second),
            "predicted_restart_seconds": round(restart - load.seconds + load.predicted_seconds, 3),
            "restart_seconds": round(restart, 3),
        }
    return Check(
        "bytes",
        "warned" if refusals else "passed",
        policy="warn" if refusals else "halt",
        expected="every file of the newest checkpoint has the size and SHA-256 of its manifest",
        found=found,
        tolerance="exact",
        seconds=seconds,
        meaning="newer checkpoints did not verify and were set aside: look for a failing disk"
        if refusals
        else "the bytes that are read are the bytes that were saved",
    )


def live_digests(
    ranks: Ranks, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> list[dict[str, str]]:
    """Collective: gives the digests of the whole live state as each rank holds it."""
    live = live_tensors(model, optimizer)
    shards = ranks.gather(state_digests(owned(live)))  # those of all ranks add up to the whole
    held = ranks.gather(state_digests(replicated(live)))
    return [add_digests([mine, *shards]) for mine in held]


def digest_check(
    manifest: Manifest, ranks: Ranks, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Check:
    """Collective: digests of the live state on every rank against the manifest."""
    began = time.monotonic()
    by_rank = live_digests(ranks, model, optimizer)
    wrong = {rank: found for rank, found in enumerate(by_rank) if found != manifest.state_digests}
    return Check(
        "state_digests",
        "failed" if wrong else "passed",
        policy="halt",
        expected=manifest.state_digests,
        found={f"rank {rank}": found for rank, found in wrong.items()} or by_rank[0],
        tolerance="exact",
        seconds=time.monotonic() - began,
        meaning="weights and optimizer state in memory are those that were saved, on every rank",
    )


def stale_copies(ranks: Ranks, model: torch.nn.Module) -> dict[str, list[str]] | None:
    """Collective: gives by rank the parameters whose working copy is not the cast of its master.

    None of an engine that has no working copies.
    """
    stale = stale_working_copies(model)
    if stale is None:
        return None
    return {f"rank {rank}": names for rank, names in enumerate(ranks.gather(stale)) if names}


def not_restored(check: Check, manifest: Manifest, owners: str = "") -> ResumeHalted:
    """Gives the error for a failed digest check, which `owners` have failed for it."""
    return ResumeHalted(
        f"the state in memory after loading has digests {check.found}"
        + (f" (check {owners})" if owners else ""),
        expected=str(check.expected),
        where=f"checkpoints/{manifest.folder.name}/manifest.json, state_digests",
        action="run `mprecipes verify` on the checkpoint; if it verifies, look for code that "
        "changes the model or optimizer while resuming, or for failing memory",
    )
