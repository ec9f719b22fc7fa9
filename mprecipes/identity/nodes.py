# SPDX-License-Identifier: Apache-2.0
"""A run folder on each node's own disk (`on_each_node`): the same run in all of them, or none.

Every folder is a whole run folder, kept by the first rank of its node. Before an attempt begins
they are made alike: a node whose folder is empty, or older, is sent the records of the run by one
that has them: `run.json` first, then sources, configs, journals, reports. Checkpoints follow when
one is sought. What is only shown (metrics, reports, tracking) is kept on rank 0's node.
"""

import logging
import os
import re
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from mprecipes.errors import ConfigError
from mprecipes.identity.files import Parcel
from mprecipes.identity.history import read_run_file
from mprecipes.identity.lease import FILE as LEASE_FILE
from mprecipes.identity.lease import LOCK_FILE, refuse_live

T = TypeVar("T")
log = logging.getLogger(__name__)
RUN_FILE = "run.json"
RECORDS = ("recipe*.py", "config*.yaml", "journal/*.jsonl", "resume/*.json", "failures/*.json")


class RankGroup(Protocol):
    """What is needed of the processes of a launch; `compute.Ranks` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def is_main(self) -> bool: ...
    @property
    def writers(self) -> tuple[int, ...]: ...
    @property
    def writes_here(self) -> bool: ...
    def gather(self, value: T) -> list[T]: ...
    def writers_first(self, error: BaseException | None, value: T | None = None) -> T: ...
    def spread(self, files: Sequence[Parcel], place: Callable[[str], Path]) -> dict[str, str]: ...


@dataclass(frozen=True)
class Held:
    """What one node has of the run.

    Attributes:
        token: name of an empty file that was just made in the folder.
        run_id: None where there is no `run.json`.
        attempts: entries in it.
        files: path -> size of its records.
    """

    token: str
    run_id: str | None = None
    attempts: int = 0
    files: Mapping[str, int] = field(default_factory=dict)


def make_alike(path: Path, ranks: RankGroup) -> str:
    """Collective: makes the records on every node those of the run; gives a name for a new one.

    Where rank 0 alone writes nothing is looked at.

    Raises:
        ConfigError: two nodes see the same folder, hold different runs, or hold other files.
        RunFolderBusy: another process is alive in the folder of a node.
    """
    new = uuid.uuid4().hex[:12]
    if len(ranks.writers) == 1:
        return new
    new = ranks.gather(new)[0]
    token = path / f".node-{ranks.rank}-{secrets.token_hex(8)}.tmp"
    try:
        held = _on_writers(path, ranks, lambda: _look(path, token))
        tokens = {rank: each.token for rank, each in held.items()}
        seen = _on_writers(
            path, ranks, lambda: [rank for rank in tokens if (path / tokens[rank]).exists()]
        )
    finally:
        if ranks.writes_here:
            token.unlink(missing_ok=True)
    _refuse_shared(path, seen)
    _refuse_different(path, held)
    parcels = plan_parcels(held)
    _on_writers(path, ranks, lambda: _make_folders(path, parcels))
    _on_writers(path, ranks, lambda: ranks.spread(parcels, path.__truediv__))
    for rank in sorted({taker for parcel in parcels for taker in parcel.takers}):
        if ranks.rank in (0, rank):
            count = sum(rank in parcel.takers for parcel in parcels)
            log.warning(
                "the node of rank %d lacked %d records of this run and was sent them", rank, count
            )
    return new


def plan_parcels(held: Mapping[int, Held]) -> list[Parcel]:
    """Gives what has to be sent, `run.json` first.

    Of `run.json` that with most attempts counts, of a journal the longest; other records are sent
    to where they are missing. Of equal ones that of the lowest rank.
    """
    parcels = []
    names = {name for each in held.values() for name in each.files} - {RUN_FILE}
    for name in [RUN_FILE, *sorted(names)]:
        grows = name.startswith("journal/")
        sizes = {rank: each.files.get(name, -1) for rank, each in held.items()}
        if name == RUN_FILE:
            sizes = {rank: each.attempts or -1 for rank, each in held.items()}
        best = max(sizes.values())
        source = min(rank for rank, size in sizes.items() if size == best)
        least = best if grows or name == RUN_FILE else 0
        takers = frozenset(rank for rank, size in sizes.items() if size < least)
        if name in held[source].files and takers:
            parcels.append(Parcel(name, held[source].files[name], source, takers))
    return parcels


def refuse_foreign_files(path: Path) -> None:
    """Refuses a folder that is no run's and not empty; checkpoints of another run are a start."""
    ours = re.compile(rf"{LEASE_FILE}|{LOCK_FILE}|\..*\.tmp")
    names = sorted(name for name in os.listdir(path) if not ours.fullmatch(name))
    if names == ["checkpoints"] and (path / names[0]).is_dir():
        start = (path / names[0]).iterdir()
        names = [] if all((each / "manifest.json").is_file() for each in start) else names
    if names and not (path / RUN_FILE).exists():
        raise ConfigError(
            f"the folder holds {len(names)} other files and no run.json: {', '.join(names[:5])}",
            expected="a folder that is new, empty, a run's own, or holds checkpoints/ alone",
            where=f"output_dir {path}",
            action="use a new --output_dir",
        )


def unusable(path: Path, error: OSError, more: str = "") -> ConfigError:
    """Gives the error for a run folder that the disk refuses."""
    return ConfigError(
        f"{error.strerror or error} ({Path(error.filename or path).name})",
        expected="a folder that can be made and written, and a recipe file that can be read",
        where=f"output_dir {path}{more}",
        action="use another --output_dir, or correct its permissions or free space",
    )


def _on_writers(path: Path, ranks: RankGroup, work: Callable[[], T]) -> dict[int, T]:
    """Collective: gives what `work` gave on each writer, or raises the first error everywhere."""
    error: Exception | None = None
    value: T | None = None
    if ranks.writes_here:
        try:
            value = work()
        except OSError as problem:
            error = unusable(path, problem, f" of rank {ranks.rank}")
        except Exception as problem:  # noqa: BLE001 - raised below, on every rank
            error = problem
    answers = ranks.gather((error, value))
    for failure, _ in answers:
        if failure is not None:
            raise failure
    return {rank: answers[rank][1] for rank in ranks.writers}  # type: ignore[misc]


def _look(path: Path, token: Path) -> Held:
    path.mkdir(parents=True, exist_ok=True)
    refuse_foreign_files(path)
    refuse_live(path)
    token.touch()
    if (facts := read_run_file(path)) is None:
        return Held(token.name)
    names = [path / RUN_FILE, *(file for pattern in RECORDS for file in path.glob(pattern))]
    files = {str(file.relative_to(path)): file.stat().st_size for file in names}
    return Held(token.name, facts["run_id"], len(facts["attempts"]), files)


def _make_folders(path: Path, parcels: Sequence[Parcel]) -> None:
    for parcel in parcels:
        (path / parcel.path).parent.mkdir(exist_ok=True)


def _refuse_shared(path: Path, seen: Mapping[int, Sequence[int]]) -> None:
    groups = {tuple(sorted(ranks)) for ranks in seen.values() if len(ranks) > 1}
    if groups:
        ranks = ", ".join(map(str, min(groups)))
        raise ConfigError(
            f"the nodes of ranks {ranks} see the same folder",
            expected="a folder of each node's own, as `on_each_node` in option checkpoint says",
            where=f"output_dir {path}",
            action="leave out `on_each_node`, or choose an --output_dir on each node's own disk",
        )


def _refuse_different(path: Path, held: Mapping[int, Held]) -> None:
    runs = {each.run_id: rank for rank, each in held.items() if each.run_id is not None}
    if len(runs) > 1:
        found = ", ".join(f"{run_id} (rank {rank})" for run_id, rank in sorted(runs.items()))
        raise ConfigError(
            f"the nodes hold different runs: {found}",
            expected="the same run, or an empty folder, on every node",
            where=f"output_dir {path}",
            action="move the folders of the other run away, or use a new --output_dir",
        )
