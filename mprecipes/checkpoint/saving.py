# SPDX-License-Identifier: Apache-2.0
"""One save, from host copies to a published checkpoint: what happens in the background.

All ranks go through it together, on a process group of their own. What fails on one rank fails the
save on all: nothing is published, the staging folder is removed, and every rank has the reason.

Where each node has a run folder of its own (`on_each_node`), each rank writes its part there, every
node is sent the parts of the others and hashes what arrives, and when all have everything, under
one manifest, each publishes: the checkpoint is complete and the same on every node.
"""

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mprecipes.checkpoint import manifest as manifests
from mprecipes.checkpoint import snapshot
from mprecipes.checkpoint.agreement import agree, check_state
from mprecipes.checkpoint.capture import Capture
from mprecipes.checkpoint.digests import add_digests, state_digests
from mprecipes.checkpoint.manifest import Problem
from mprecipes.checkpoint.shelf import Shelf, step_name
from mprecipes.checkpoint.storage import FileEntry, put, put_bytes, put_json
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import CheckpointError, NumericsError, RecipeError
from mprecipes.faults import fault_point
from mprecipes.identity.files import Parcel

log = logging.getLogger(__name__)
SPACE_FACTOR, SPACE_MARGIN_BYTES = 1.1, 16 << 20


@dataclass(frozen=True)
class SaveReport:
    """What became of one save, for metrics and the console.

    Attributes:
        path: of the published checkpoint; None when the save failed.
        bytes: of all ranks' files.
        rank_bytes: of this rank's files.
        seconds: from the copy until published and durable.
        blocked_seconds: the training thread stood still, for the copy and for the save before.
        waited_seconds: of these, for the save before, which was still in flight.
        digest_seconds: the background computed state digests and looked for NaN.
        write_seconds: the background wrote, hashed and synced this rank's files.
        kept: the step was published already, and is good.
        error: why it failed; None when it did not.
        note: what to tell a person about stopping; None for nothing.
    """

    step: int
    path: Path | None = None
    bytes: int = 0
    rank_bytes: int = 0
    seconds: float = 0.0
    blocked_seconds: float = 0.0
    waited_seconds: float = 0.0
    digest_seconds: float = 0.0
    write_seconds: float = 0.0
    kept: bool = False
    error: str | None = None
    note: str | None = None


class LostPeers(CheckpointError):
    """The ranks cannot agree any more: no later save can succeed in this process."""


class Saver:
    """Carries out saves on one rank.

    Args:
        ranks: on a group that no other thread uses.
        beside: small files that this rank adds to every checkpoint: name -> content.
    """

    def __init__(
        self, shelf: Shelf, ranks: Ranks, run_id: str, beside: Mapping[str, bytes] | None = None
    ) -> None:
        self._shelf, self._ranks, self._run_id = shelf, ranks, run_id
        self._beside = dict(beside or {})

    def __call__(self, capture: Capture) -> tuple[SaveReport, RecipeError | None]:
        """Collective: publishes what was captured, or says on every rank why not; never raises."""
        step = capture.step
        try:
            return self._save(capture), None
        except RecipeError as problem:
            error = problem
        except Exception as problem:  # noqa: BLE001 - a peer or the group is gone
            lost = LostPeers(
                f"rank {self._ranks.rank} lost the others: {type(problem).__name__}: {problem}",
                expected="all ranks finish a save together",
                where=f"saving step {step}",
                action="launch again: the run continues from the newest checkpoint",
            )
            lost.__cause__ = problem
            return self._failed(capture, lost), lost
        if self._ranks.writes_here:
            self._shelf.remove(self._shelf.staging(step))
        return self._failed(capture, error), error

    def _failed(self, capture: Capture, error: RecipeError) -> SaveReport:
        seconds = time.monotonic() - capture.began
        return SaveReport(capture.step, seconds=seconds, error=str(error))

    def _save(self, capture: Capture) -> SaveReport:
        ranks, step = self._ranks, capture.step
        refuse_untrained(capture)
        doing = (
            f"saving step {step}",
            "every rank's files on the disk; nothing was published, older ones are untouched",
            "free space or repair the disk; a later save, or the same command again, goes on",
        )
        if (kept := self._kept(capture, doing)) is not None:
            return SaveReport(step, self._shelf.checkpoints / kept, kept=True)
        began = time.monotonic()
        shares = agree(ranks, doing, lambda: self._examine(capture))
        bad = [name for names, _, _ in shares for name in names]
        check_state(step, bad, [replicas for _, replicas, _ in shares])
        digests = add_digests(digests for _, _, digests in shares)
        fault_point("save.after_check", step)
        digest_seconds, began = time.monotonic() - began, time.monotonic()
        written = agree(ranks, doing, lambda: self._write(capture))
        write_seconds = time.monotonic() - began
        files = [entry for entries in written for entry in entries]
        if len(ranks.writers) > 1:
            wrong = agree(ranks, doing, lambda: self._exchange(files, step))
            check_arrived(wrong, step)
        values = self._describe(capture, doing, files, digests)
        agree(ranks, doing, lambda: self._publish(step, files, values))
        fault_point("save.after_commit", step)
        return SaveReport(
            step,
            self._shelf.checkpoints / step_name(step),
            bytes=sum(entry.bytes for entry in files),
            rank_bytes=sum(entry.bytes for entry in written[ranks.rank]),
            seconds=time.monotonic() - capture.began,
            digest_seconds=digest_seconds,
            write_seconds=write_seconds,
        )

    def _kept(self, capture: Capture, doing: tuple[str, str, str]) -> str | None:
        """Collective: the name of the published checkpoint of this step, if every node has it."""
        answers = agree(self._ranks, doing, lambda: self._begin(capture))
        found = [answers[rank] for rank in self._ranks.writers]
        if None in found and len(set(found)) > 1:  # some nodes lost it: it is made anew on all
            problem = Problem(manifests.NAME, "not on every node", "the same on every node")
            agree(self._ranks, doing, lambda: self._begin(capture, problem))
            return None
        return answers[self._ranks.writer_of(self._ranks.rank)]

    def _begin(self, capture: Capture, refuse: Problem | None = None) -> str | None:
        """Gives the name of the published checkpoint of this step, or makes room for one.

        Args:
            refuse: why one that is published is not to be kept.
        """
        if capture.error is not None:
            raise capture.error
        fault_point("save.begin", capture.step)
        if not self._ranks.writes_here:
            return None
        self._shelf.checkpoints.mkdir(parents=True, exist_ok=True)
        kept = self._shelf.make_room(capture.step, refuse)
        if kept is None:
            where = f"saving step {capture.step}"
            check_space(self._shelf.checkpoints, capture.state_bytes, where=where)
        fault_point("save.after_begin", capture.step)
        return kept

    def _examine(self, capture: Capture) -> tuple[list[str], dict[str, str], dict[str, str]]:
        """Gives the names of what is not finite, digests of what all hold, and of the share."""
        fault_point("save.before_digest", capture.step)
        found = snapshot.not_finite(capture.tensors)
        replicas, digests = capture.replicas(), state_digests(capture.tensors)
        fault_point("save.after_digest", capture.step)
        return found, replicas, digests

    def _write(self, capture: Capture) -> list[FileEntry]:
        """Makes this rank's files durable."""
        rank, step = self._ranks.rank, capture.step
        staging = self._shelf.staging(step)
        entries = put(capture.tensors, staging, rank=rank, world_size=1, step=step)
        state = {"rank": rank, "state": dict(capture.rank_state)}
        fault_point("save.before_rank_state", step)
        entries.append(put_json(state, staging, rank_file(rank), rank=rank))
        for name, data in self._beside.items():
            entries.append(put_bytes(data, staging, name, rank=rank))
        fault_point("save.after_rank_state", step)
        return entries

    def _exchange(self, files: Sequence[FileEntry], step: int) -> list[str]:
        """Brings to each node what the ranks of others wrote; gives what arrived as other bytes."""
        ranks, staging = self._ranks, self._shelf.staging(step)
        parcels = []
        for entry in files:
            source = ranks.writer_of(entry.rank)
            takers = frozenset(ranks.writers) - {source}
            parcels.append(Parcel(entry.path, entry.bytes, source, takers))
        arrived = ranks.spread(parcels, staging.__truediv__)
        return [e.path for e in files if arrived.get(e.path, e.sha256) != e.sha256]

    def _describe(
        self,
        capture: Capture,
        doing: tuple[str, str, str],
        files: Sequence[FileEntry],
        digests: Mapping[str, str],
    ) -> dict[str, Any]:
        """Collective: rank 0's manifest, on every rank that writes one."""

        ranks, values = self._ranks, dict[str, Any]()

        def build() -> None:
            fault_point("save.after_gather", capture.step)
            if ranks.is_main:
                values.update(
                    manifests.build_manifest(
                        run_id=self._run_id,
                        files=files,
                        state_digests=digests,
                        scaler=capture.scaler,
                        params=capture.parameters["params"],
                        shapes=capture.parameters["shapes"],
                        **capture.about,
                    )
                )

        agree(ranks, doing, build)
        return ranks.share(values) if len(ranks.writers) > 1 else values

    def _publish(self, step: int, files: Sequence[FileEntry], values: Mapping[str, Any]) -> None:
        """Where this rank writes, after every rank has written: the manifest, then the name."""
        if not self._ranks.writes_here:
            return
        staging = self._shelf.staging(step)
        for entry in files:
            if (size := (staging / entry.path).stat().st_size) != entry.bytes:
                raise OSError(f"{entry.path} has {size} bytes, {entry.bytes} were written")
        fault_point("save.before_sums", step)
        manifests.write_sums(staging, files)
        fault_point("save.before_manifest", step)
        manifests.write_manifest(staging, values)
        fault_point("save.after_manifest", step)
        fault_point("save.before_publish", step)
        self._shelf.publish(step)
        fault_point("save.after_publish", step)


def refuse_untrained(capture: Capture) -> None:
    """Refuses to keep for good, as the end of a training, what no update ever reached.

    A run that is shorter than the skipped steps in a row it allows would else finish with its
    initial weights.

    Raises:
        NumericsError: naming milestone and steps; the same on every rank.
    """
    name, updates = capture.about["milestone"], capture.about["position"]["updates"]
    if name is not None and updates == 0 and capture.step > 0:
        raise NumericsError(
            f"milestone {name}: none of {capture.step} steps was applied",
            expected="at least one update; nothing was published",
            where=f"saving step {capture.step}",
            action="see why steps were skipped: the lines above name the module that overflowed; "
            "try --precision bf16",
        )


def check_arrived(wrong: Sequence[Sequence[str]], step: int) -> None:
    """Refuses a save of which a node was sent other bytes than were hashed when they were written.

    Args:
        wrong: by rank, the files that did not arrive as they were.

    Raises:
        CheckpointError: naming the first rank and its files.
    """
    for rank, paths in enumerate(wrong):
        if paths:
            raise CheckpointError(
                f"rank {rank} was sent other bytes than were written: {', '.join(paths[:3])}",
                expected="the SHA-256 of what was written; nothing was published on any node",
                where=f"saving step {step}",
                action="a later save goes on; if it happens again suspect the memory, disk or "
                "network of these nodes",
            )


def check_space(folder: Path, state_bytes: int, *, where: str) -> None:
    """Refuses to begin what would fill the disk: a save, or a copy from the mirror.

    Raises:
        CheckpointError: what is free is less than the measured size with a margin.
    """
    free = shutil.disk_usage(folder).free
    needed = int(state_bytes * SPACE_FACTOR) + SPACE_MARGIN_BYTES
    if free < needed:
        raise CheckpointError(
            f"{_size(free)} are free on the disk of checkpoints/",
            expected=f"{_size(needed)}: the measured {_size(state_bytes)} x {SPACE_FACTOR} + "
            f"{_size(SPACE_MARGIN_BYTES)}; nothing was written, older checkpoints are untouched",
            where=where,
            action="free space on this disk, or launch again with a smaller --keep_last",
        )


def rank_file(rank: int) -> str:
    """Gives the name of the file that holds what one rank alone must find again."""
    return f"rank-{rank:05d}.json"


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
