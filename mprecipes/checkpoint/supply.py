# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that some nodes lack, from one that has it; where each node has its own disk.

What arrives is hashed and compared with the manifest before it gets the name of a checkpoint, as
when it is fetched from a mirror.
"""

import logging
import shutil
from pathlib import Path

from mprecipes.checkpoint.agreement import agree
from mprecipes.checkpoint.manifest import (
    NAME,
    Problem,
    files_of,
    read_manifest,
    verify_folder,
    write_manifest,
)
from mprecipes.checkpoint.shelf import Shelf
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import VerificationError
from mprecipes.faults import fault_point
from mprecipes.identity.files import Parcel, sha256_file

log = logging.getLogger(__name__)
Wrong = dict[int, list[Problem]]  # what is wrong with a checkpoint, by the rank that writes there


def look(folder: Path) -> list[Problem]:
    """Gives what is wrong with a checkpoint as far as it shows without reading its tensors."""
    try:
        known = {entry.path: entry.sha256 for entry in read_manifest(folder).files}
    except VerificationError as error:
        return [Problem.of(error, NAME)]
    return verify_folder(folder, lambda path: known.get(path.name) or sha256_file(path))


def supply(shelf: Shelf, ranks: Ranks, name: str) -> tuple[list[int], Wrong]:
    """Collective: brings the checkpoint called `name` to every node that lacks it.

    Blocks for sending, writing and hashing it. Nothing where one rank writes.

    Returns:
        The ranks of the writers that have it, and what is wrong with it where it was to come from:
        then nothing was brought.

    Raises:
        CheckpointError: a node could not write it; on every rank.
    """
    if len(ranks.writers) == 1:
        return [0], {}
    folder = shelf.checkpoints / name
    doing = (
        f"bringing checkpoints/{name} to every node",
        "a disk that can be written, with space for it, on each node",
        "free space or repair the disk of the rank that is named, then launch again",
    )
    # Only the writer looks: it may have moved the folder away between two looks of its neighbours.
    reads = ranks.writes_here
    looks = agree(ranks, doing, lambda: look(folder) if reads and folder.is_dir() else None)
    found = {rank: looks[rank] for rank in ranks.writers}
    holders = [rank for rank, problems in found.items() if problems is not None]
    good = [rank for rank in holders if not found[rank]]
    lacking = [rank for rank in ranks.writers if rank not in holders]
    if not lacking:
        return holders, {}
    if not good:
        return holders, {rank: problems for rank, problems in found.items() if problems}
    source, takers = good[0], frozenset(lacking)
    mine = read_manifest(folder) if ranks.rank == source else None
    raw, entries = ranks.share((mine.raw, files_of(mine)) if mine else ({}, []), source)
    step, here = raw["step"], folder if ranks.rank == source else shelf.staging(raw["step"])

    def begin() -> None:
        if ranks.rank in takers:
            shutil.rmtree(here, ignore_errors=True)
            here.mkdir(parents=True)

    def send() -> list[Problem]:
        try:
            arrived = ranks.spread(
                [Parcel(entry.path, entry.bytes, source, takers) for entry in entries],
                here.__truediv__,
            )
        except OSError as error:
            if ranks.rank != source:
                raise
            return [Problem(Path(error.filename or NAME).name, f"unreadable ({error})", "a file")]
        return [
            Problem(entry.path, f"sha256 {arrived[entry.path]} when sent", f"sha256 {entry.sha256}")
            for entry in entries
            if arrived.get(entry.path, entry.sha256) != entry.sha256
        ]

    def publish() -> None:
        if ranks.rank in takers:
            write_manifest(here, raw)
            fault_point("supply.before_publish", step)
            shelf.publish(step, name)

    agree(ranks, doing, begin)
    answers = agree(ranks, doing, send)
    if problems := list(dict.fromkeys(problem for found in answers for problem in found)):
        if ranks.rank in takers:
            shelf.remove(here)
        return holders, {source: problems}
    agree(ranks, doing, publish)
    if ranks.rank in (0, *takers):
        nodes = ", ".join(map(str, lacking))
        log.warning("%s was missing on the node of rank %s: sent by rank %d", name, nodes, source)
    return list(ranks.writers), {}
