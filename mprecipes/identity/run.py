# SPDX-License-Identifier: Apache-2.0
"""The run folder: who runs here, what ran before, how each attempt ended.

On disk: `run.json` (schema, run_id, wandb_id, recipe, created, horizon, attempts), `lease.json`
while a process runs here, `recipe.py` and `config.yaml` of the first attempt,
`recipe.attempt-N.py` and `config.attempt-N.yaml` of later ones, and
`failures/attempt-NNNN-rank-R.json` of ranks other than 0. `run.json` is written by rank 0 only (of
a folder on a node's own disk by the first rank there, `nodes.py`) and holds no absolute path, so a
folder may be moved between attempts.
"""

import contextlib
import inspect
import logging
import socket
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mprecipes.errors import RecipeError, RunFinished, RunFolderBusy
from mprecipes.faults import fault_point
from mprecipes.identity.config import Origins, config_to_dict, render_config
from mprecipes.identity.files import remove_unfinished, write_atomically, write_json_atomically
from mprecipes.identity.history import (
    SCHEMA,
    completed,
    failure_of_other_rank,
    now,
    read_run_file,
)
from mprecipes.identity.lease import Lease
from mprecipes.identity.nodes import RankGroup, make_alike, refuse_foreign_files, unusable
from mprecipes.identity.outcome import is_out_of_memory, judge, out_of_memory, without_paths
from mprecipes.identity.recipe import Recipe, RecipeIdentity, identify

log = logging.getLogger(__name__)


@dataclass
class RunFolder:
    """An open run folder, as every rank sees it.

    `attempt` is 0 for the first launch into it, then 1, 2, ... `step` is the last finished step:
    set it in the loop; heartbeats and `run.json` carry it on.
    """

    path: Path
    run_id: str
    wandb_id: str
    attempt: int
    is_main: bool
    recipe: RecipeIdentity
    step: int = 0
    _book: "_Book | None" = field(default=None, repr=False)

    @property
    def writes_here(self) -> bool:
        """True on rank 0; where each node has a run folder, on the first rank of every node."""
        return self._book is not None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    @property
    def milestones(self) -> Path:
        return self.path / "milestones"

    @property
    def resume_reports(self) -> Path:
        return self.path / "resume"

    @property
    def reports(self) -> Path:
        return self.path / "reports"

    def record(self, **facts: Any) -> None:
        """Merges JSON-safe facts into this attempt's entry; a no-op where another rank writes.

        On disk afterwards: the new `run.json`, durable. Blocks for two fsyncs.
        """
        self.step = facts.get("step", self.step)
        if self._book is not None:
            self._book.write(**{"step": self.step, **facts})

    def check_lease(self) -> None:
        """Asks the disk whether this folder is still ours; a no-op where another rank writes.

        Raises:
            RunFolderBusy: another process took it over, because this one seemed dead for a minute.
        """
        if self._book is not None:
            self._book.lease.check()


class RunOptions(Protocol):
    """The options of a recipe's config that `open_run` reads."""

    @property
    def output_dir(self) -> str: ...
    @property
    def max_steps(self) -> int: ...


def open_run(
    config: RunOptions, origins: dict[str, str], recipe: Recipe, ranks: RankGroup
) -> contextlib.AbstractContextManager[RunFolder]:
    """Opens a recipe's run folder: `open_folder` with what the recipe and its config say.

    Args:
        config: an instance of the Config that the recipe's file defines.
        origins: where each option came from.
    """
    source = Path(inspect.getfile(type(config)))
    return open_folder(
        config.output_dir,
        recipe=identify(recipe, source),
        source=source,
        config=config_to_dict(config),
        origins=origins,
        horizon=config.max_steps,
        ranks=ranks,
    )


@contextlib.contextmanager
def open_folder(
    output_dir: str | Path,
    *,
    recipe: RecipeIdentity,
    source: Path,
    config: dict[str, Any],
    origins: dict[str, str],
    horizon: int,
    ranks: RankGroup,
) -> Iterator[RunFolder]:
    """Opens a run folder for one attempt and records how it ends. Collective at the start.

    Args:
        source: the recipe's file; its bytes are kept in the folder.
        config: the resolved config, JSON-safe; kept with `origins` as YAML.
        horizon: the step at which the run is finished.

    Raises:
        RunFolderBusy: another live process holds the folder.
        RunFinished: the run already reached this horizon, and is not told to go back to a step.
        ConfigError: the folder holds other files, or cannot be written.
        OutOfMemory: in place of torch's own error, from inside the `with` block.
    """
    book: _Book | None = None
    error: Exception | None = None
    run_id = make_alike(Path(output_dir), ranks)
    if ranks.writes_here:
        try:
            kept = _Kept(recipe, source, config, origins)
            book = _open(Path(output_dir), kept, horizon, ranks.world_size, run_id)
        except Exception as failure:  # noqa: BLE001  raised below, on every rank
            error = failure
    try:
        try:
            names = ranks.writers_first(error, None if book is None else book.names)
        except Exception as failure:
            if book is not None:  # the folder of another node was refused
                book.write(ended=now(), step=0, **judge(failure, ranks.rank))
            raise
        run = RunFolder(Path(output_dir), *names, ranks.is_main, recipe, _book=book)
        if book is not None:
            book.lease.start(run.attempt, lambda: run.step)
        try:
            yield run
        except BaseException as failure:
            if is_out_of_memory(failure) and not isinstance(failure, RecipeError):
                named = out_of_memory(failure, ranks.rank, run.step, config)
                _record_end(run, ranks.rank, named)
                raise named from failure
            _record_end(run, ranks.rank, failure)
            raise
        _record_end(run, ranks.rank, None)
    finally:
        if book is not None:
            book.lease.release()


class _Book:
    """`run.json` in the hands of its only writer."""

    def __init__(self, path: Path, lease: Lease, facts: dict[str, Any]) -> None:
        self.path, self.lease, self.facts = path, lease, facts
        self._writing = threading.Lock()

    @property
    def names(self) -> tuple[str, str, int]:
        return self.facts["run_id"], self.facts["wandb_id"], self.facts["attempts"][-1]["attempt"]

    def write(self, **facts: Any) -> None:
        self.lease.check()
        with self._writing:
            self.facts["attempts"][-1].update(without_paths(facts))
            write_json_atomically(self.path / "run.json", self.facts)


@dataclass(frozen=True)
class _Kept:
    """What an attempt keeps of itself in the folder."""

    recipe: RecipeIdentity
    source: Path
    config: dict[str, Any]
    origins: dict[str, str]


def _open(path: Path, kept: _Kept, horizon: int, world_size: int, run_id: str) -> _Book:
    """Takes the lease, begins the next attempt in run.json, keeps source and config.

    Args:
        run_id: for a run that has none yet.
    """
    try:
        code, recipe = kept.source.read_bytes(), kept.recipe
        path.mkdir(parents=True, exist_ok=True)
        refuse_foreign_files(path)
        lease = Lease.acquire(path)
        try:
            fault_point("run.after_lease")
            remove_unfinished(path)
            facts = read_run_file(path) or {
                "schema": SCHEMA,
                "run_id": run_id,
                "wandb_id": run_id,
                "recipe": recipe.to_dict(),
                "created": now(),
                "horizon": horizon,
                "attempts": [],
            }
            back_to = kept.origins.resume_from if isinstance(kept.origins, Origins) else None
            if back_to is None or back_to in {e.get("resume_from") for e in facts["attempts"]}:
                _refuse_finished(path, facts["attempts"], horizon)
            facts["attempts"] = completed(path, facts["attempts"], lease.taken_over)
            number = len(facts["attempts"])
            entry: dict[str, Any] = {
                "attempt": number,
                "started": now(),
                **dict.fromkeys(("ended", "outcome", "exit_code", "error", "step")),
                "horizon": horizon,
                "world_size": world_size,
                "host": socket.gethostname(),
                "recipe": f"{recipe.name}@{recipe.version}#{recipe.sha256[:8]}",
            }
            if lease.taken_over is not None:
                entry["lease_taken_from"] = str(lease.taken_over)
            facts["attempts"].append(entry)
            book = _Book(path, lease, facts)
            book.write()
            suffix = f".attempt-{number}" if number else ""
            text = render_config(kept.config, kept.origins).encode("utf-8")
            write_atomically(path / f"recipe{suffix}.py", code)
            write_atomically(path / f"config{suffix}.yaml", text)
            return book
        except BaseException:
            lease.release()
            raise
    except RecipeError:
        raise
    except OSError as error:
        raise unusable(path, error, f", recipe {kept.source}") from error


def _refuse_finished(path: Path, attempts: list[dict[str, Any]], horizon: int) -> None:
    ran = [entry for entry in attempts if entry["outcome"] != "refused"]
    if ran and ran[-1]["outcome"] == "finished" and ran[-1].get("horizon") == horizon:
        raise RunFinished(
            f"this run finished all {horizon} steps at {ran[-1].get('ended')}",
            expected="nothing more to do",
            where=str(path),
            action="train longer with a larger --max_steps and --accept changed_max_steps, go back "
            "with --resume_from STEP, or start afresh in a new --output_dir",
        )


def _record_end(run: RunFolder, rank: int, error: BaseException | None) -> None:
    """Writes how the attempt ended: rank 0 into run.json, a failed other rank into failures/."""
    facts = {"ended": now(), **judge(error, rank), "step": run.step}
    book = run._book
    fault_point("run.before_outcome", run.step)
    try:
        if book is not None:
            if book.lease.num_failed_heartbeats:
                facts["failed_heartbeats"] = book.lease.num_failed_heartbeats
            if facts["outcome"] == "crashed":  # perhaps only because another rank is gone
                facts |= failure_of_other_rank(run.path, run.attempt)
            if facts["outcome"] != "refused":
                book.facts["horizon"] = book.facts["attempts"][-1]["horizon"]
            book.write(**facts)
        elif facts["exit_code"] not in (0, 75):
            facts |= {"attempt": run.attempt, "rank": rank, "host": socket.gethostname()}
            facts["traceback"] = traceback.format_exception(error)
            (run.path / "failures").mkdir(exist_ok=True)
            name = f"attempt-{run.attempt:04d}-rank-{rank}.json"
            write_json_atomically(run.path / "failures" / name, without_paths(facts))
    except (OSError, RunFolderBusy) as problem:  # must not hide how the run itself ended
        log.error("outcome %s of this attempt is not recorded: %s", facts["outcome"], problem)
