# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a branch that was given up, by a rollback or by `--resume_from`.

The mirror still holds them, under higher steps than the branch that goes on. So that none is taken
for the newest there, `abandoned.json` in the run folder notes each cut before anything is moved,
and the mirror's own `mirror.json` says which root digests are abandoned (`mirroring.py`), which
survives this disk. A later checkpoint of the same step has another root digest, and is good.
"""

import json
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mprecipes.checkpoint.manifest import Manifest
from mprecipes.checkpoint.milestones import read_milestones
from mprecipes.errors import CheckpointError
from mprecipes.identity.files import write_json_atomically

FILE = "abandoned.json"


@dataclass(frozen=True)
class Cut:
    """One time at which a branch was given up.

    Attributes:
        id: what the mirror knows it by once it has taken note.
        from_step: what the mirror had from this step on is abandoned, whether it was still here or
            not: nothing is copied there before it has taken note. None for the roots alone.
        roots: root digests of the checkpoints that were set aside here.
    """

    id: str
    from_step: int | None
    roots: frozenset[str]


def abandon(
    run: Path,
    manifests: Sequence[Manifest],
    *,
    from_step: int | None = None,
    kept: Iterable[Manifest] = (),
) -> None:
    """Where this rank writes: notes what is about to be set aside; blocks for two fsyncs.

    Args:
        manifests: of what is set aside.
        from_step: the first step that is given up, also at the mirror, and milestones of it.
        kept: what this run goes on from and was perhaps set aside once: it is so no more.

    Raises:
        CheckpointError: it could not be noted; nothing may be set aside then.
    """
    try:
        old = read_cuts(run)
        here = {manifest.root_sha256 for manifest in kept}
        cuts = [Cut(cut.id, cut.from_step, cut.roots - here) for cut in old]
        if manifests or from_step is not None:
            made = read_milestones(run / "milestones").values() if from_step is not None else ()
            leaving = [*manifests, *(each for each in made if each.step >= (from_step or 0))]
            roots = frozenset(manifest.root_sha256 for manifest in leaving)
            cuts.append(Cut(uuid.uuid4().hex, from_step, roots - here))
        if cuts != old:
            values = [{**vars(cut), "roots": sorted(cut.roots)} for cut in cuts]
            write_json_atomically(run / FILE, {"schema": 1, "cuts": values})
    except OSError as error:
        raise CheckpointError(
            f"{type(error).__name__}: {error}",
            expected="a durable note of the checkpoints that are set aside, for the mirror",
            where=FILE,
            action="free space or repair the disk, then launch the same command again",
        ) from error


def read_cuts(run: Path) -> list[Cut]:
    """Gives the cuts of a run, oldest first.

    Raises:
        OSError: the file is damaged or cannot be read.
    """
    try:
        values = json.loads((run / FILE).read_text(encoding="utf-8"))["cuts"]
        return [_cut(value) for value in values]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise OSError(f"{FILE} is damaged ({error}); remove it") from error


def abandoned_roots(
    cuts: Iterable[Cut],
    there: Iterable[Manifest],
    *,
    known: frozenset[str],
    noted: Collection[str],
    here: Iterable[Manifest] = (),
) -> frozenset[str]:
    """Gives the root digests at the mirror that nobody is to go on from.

    Args:
        cuts: of this run folder.
        there: what the mirror holds.
        known: root digests that the mirror says are abandoned.
        noted: ids of the cuts that the mirror has taken note of.
        here: what lies in `checkpoints/`, from which this run may go on.
    """
    found = set(known)
    pending: list[int] = []
    for cut in cuts:
        found |= cut.roots
        if cut.from_step is not None and cut.id not in noted:
            pending.append(cut.from_step)
    if pending:
        found |= {each.root_sha256 for each in there if each.step >= min(pending)}
    return frozenset(found - {manifest.root_sha256 for manifest in here})


def _cut(value: dict[str, Any]) -> Cut:
    step = value["from_step"]
    return Cut(
        str(value["id"]), None if step is None else int(step), frozenset(map(str, value["roots"]))
    )
