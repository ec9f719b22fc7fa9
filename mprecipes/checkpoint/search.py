# SPDX-License-Identifier: Apache-2.0
"""The newest checkpoint that can be trusted: step from its manifest, all bytes on every rank.

Where each node has a run folder of its own, a checkpoint that one node lacks or has a damaged copy
of is sent there by one that has it (`supply.py`), so that the one that is taken verifies on all.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mprecipes.checkpoint.agreement import agree
from mprecipes.checkpoint.manifest import NAME, Manifest, Problem, read_manifest, verify_folder
from mprecipes.checkpoint.problems import check_reachable
from mprecipes.checkpoint.shelf import Shelf, step_name
from mprecipes.checkpoint.supply import Wrong, look, supply
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import CheckpointError, NoTrustedCheckpoint

log = logging.getLogger(__name__)
_DOING = ("checkpoints/", "a folder every rank can read", "look at the disk, then launch again")


@dataclass(frozen=True)
class Refusal:
    """A checkpoint that did not verify.

    Attributes:
        name: of its folder in `checkpoints/`, and the node, where each has its own.
        quarantined_as: its name in `quarantine/`; None on other ranks or if it could not be moved.
    """

    name: str
    problems: list[Problem]
    quarantined_as: str | None


def find_newest(
    shelf: Shelf,
    ranks: Ranks,
    accept: Callable[[Manifest], Wrong],
    fetch: Callable[[], Manifest | None],
) -> tuple[Manifest | None, list[Refusal]]:
    """Collective: gives the newest checkpoint that is accepted, and what was refused.

    None when there never was one. On disk afterwards: what was refused lies in `quarantine/`.

    Args:
        accept: collective; gives all ranks' problems with a candidate that looks whole without its
            tensors being read.
        fetch: main process only; brings a checkpoint here when none here is accepted.

    Raises:
        NoTrustedCheckpoint: there are, or were, checkpoints and none is accepted; on every rank.
        CheckpointError: a node cannot read, cannot write, or does not keep what is there; on every
            rank.
    """
    lists = agree(ranks, _DOING, lambda: _Listed.of(shelf))
    names, refusals, earlier = _candidates(shelf, ranks, [lists[rank] for rank in ranks.writers])
    fetched, failed = False, set[tuple[str, int]]()
    while names or not fetched:
        if not names:
            names, fetched = _fetched(ranks, fetch), True
            continue
        name = names[0]
        holders, wrong = supply(shelf, ranks, name)
        if not wrong:
            manifest, wrong = verify_everywhere(shelf.checkpoints / name, ranks, deep=False)
            if manifest is not None:
                wrong = accept(manifest)
                if not wrong:
                    return manifest, refusals
        if all(rank in wrong for rank in holders):
            names.pop(0)
        else:  # once more, after a node that has it sends it to those that then do not
            _refuse_twice(name, wrong, failed)
            failed |= {(name, rank) for rank in wrong}
        refusals += _refuse(shelf, ranks, name, wrong)
    refused = [f"{refusal.name}: {'; '.join(map(str, refusal.problems))}" for refusal in refusals]
    refused += [f"quarantine/{name}: refused earlier" for name in earlier]
    if not refused:
        return None, []
    raise NoTrustedCheckpoint(
        "no checkpoint verifies:\n    " + "\n    ".join(refused),
        expected="at least one whose every byte agrees with its manifest",
        where="checkpoints/",
        action="put an intact copy into checkpoints/, or start again with another --output_dir; "
        "what was refused is kept in quarantine/",
    )


@dataclass(frozen=True)
class _Listed:
    """What lies on one disk: (step, name) of what has a manifest, what has none, and quarantine."""

    found: list[tuple[int, str]]
    broken: list[tuple[str, Problem]]
    earlier: list[str]

    @classmethod
    def of(cls, shelf: Shelf) -> "_Listed":
        found, broken = shelf.scan()
        listed = [(manifest.step, manifest.folder.name) for manifest in found]
        return cls(listed, broken, shelf.quarantined())


def _candidates(
    shelf: Shelf, ranks: Ranks, lists: list[_Listed]
) -> tuple[list[str], list[Refusal], list[str]]:
    """Names on any node, newest first; what is refused at once; what was refused earlier."""
    found = {pair for listed in lists for pair in listed.found}
    newest = sorted(found, key=lambda pair: (-pair[0], pair[1] != step_name(pair[0]), pair[1]))
    refusals = [
        refusal
        for rank, listed in zip(ranks.writers, lists)
        for name, problem in listed.broken
        for refusal in _refuse(shelf, ranks, name, {rank: [problem]})
    ]
    earlier = sorted({name for listed in lists for name in listed.earlier})
    return list(dict.fromkeys(name for _, name in newest)), refusals, earlier


def verify_everywhere(
    folder: Path, ranks: Ranks, *, deep: bool = True
) -> tuple[Manifest | None, Wrong]:
    """Collective: gives the manifest when no rank has a problem with the folder, and all problems.

    Args:
        deep: read every byte; else manifest, names, sizes and `SHA256SUMS` only.
    """

    manifest: Manifest | None = None

    def verify() -> tuple[str | None, list[Problem]]:
        nonlocal manifest
        if problems := verify_folder(folder) if deep else look(folder):
            return None, problems
        manifest = read_manifest(folder)
        return manifest.root_sha256, []

    verdicts = agree(ranks, _DOING, verify)
    wrong = by_writer(ranks, [problems for _, problems in verdicts])
    differing = [rank for rank, (found, _) in enumerate(verdicts) if found != verdicts[0][0]]
    if not wrong and differing:
        problem = Problem(NAME, "not the same on all ranks", "one text on every rank")
        wrong = {ranks.writer_of(rank): [problem] for rank in differing}
    return (None if wrong else manifest), wrong


def by_writer(ranks: Ranks, problems: Sequence[Sequence[Problem]]) -> Wrong:
    """Gives the problems of all ranks, each once, by the rank that writes on their disk."""
    wrong: Wrong = {}
    for rank, found in enumerate(problems):
        known = wrong.setdefault(ranks.writer_of(rank), [])
        known += [problem for problem in found if problem not in known]
    return {rank: found for rank, found in wrong.items() if found}


def _fetched(ranks: Ranks, fetch: Callable[[], Manifest | None]) -> list[str]:
    """The name of the checkpoint that rank 0 brought here, if any; the others wait for it."""

    def name() -> list[str]:
        manifest = fetch()
        return [] if manifest is None else [manifest.folder.name]

    return ranks.on_main(name)


def _refuse_twice(name: str, wrong: Wrong, failed: set[tuple[str, int]]) -> None:
    """Refuses to go on with a node that was sent a good copy and does not have one."""
    for rank, problems in wrong.items():
        if (name, rank) in failed:
            raise CheckpointError(
                f"{name} was sent to the node of rank {rank} and does not verify there: "
                f"{'; '.join(map(str, problems))}",
                expected="what another node has, byte for byte",
                where=f"checkpoints/{name}",
                action="look at the disk and memory of this node, or launch without it; the copies "
                "of the other nodes are untouched",
            )


def _refuse(shelf: Shelf, ranks: Ranks, name: str, wrong: Wrong) -> list[Refusal]:
    """Sets a checkpoint aside where it is wrong; the same answer, or error, on every rank."""
    refusals = []
    for rank, problems in wrong.items():
        check_reachable(name, problems, f", on the node of rank {rank}")
    for rank, problems in wrong.items():
        target = None
        if rank == ranks.rank:
            try:
                target = shelf.set_aside(shelf.checkpoints / name, problems)
            except OSError as error:  # refused all the same, and again at the next launch
                log.warning("%s could not be moved to quarantine (%s)", name, error)
        node = f" on the node of rank {rank}" if len(ranks.writers) > 1 else ""
        refusals.append(Refusal(name + node, problems, target))
    return refusals
