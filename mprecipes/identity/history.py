# SPDX-License-Identifier: Apache-2.0
"""What a run folder says about its run: `run.json`, read and completed, never written here."""

import json
import logging
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mprecipes.errors import ConfigError
from mprecipes.identity.lease import Holder, read_holder

SCHEMA = 1
KEYS = {"run_id": str, "wandb_id": str, "recipe": dict, "created": str, "horizon": int}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInfo:
    """What a run folder says about its run, without touching it.

    Attributes:
        attempts: the entries of `run.json`; a last one that ended without a word is completed from
            the failures of other ranks, or as "killed".
        is_running: a live process holds the lease.
    """

    path: Path
    run_id: str
    wandb_id: str
    recipe: dict[str, Any]
    created: str
    horizon: int
    attempts: list[dict[str, Any]]
    lease: dict[str, Any] | None
    is_running: bool

    @property
    def outcome(self) -> str:
        """How the last attempt ended, or "running"."""
        return "running" if self.is_running else self.attempts[-1]["outcome"]


def read_run(path: str | Path) -> RunInfo:
    """Gives what is known of the run in a folder; writes nothing.

    Raises:
        ConfigError: no run folder, or a damaged `run.json`.
    """
    path = Path(path)
    holder = read_holder(path)  # before run.json: a run that ends in between then reads as ended
    facts = read_run_file(path)
    if facts is None:
        raise ConfigError(
            "no run.json",
            expected="the output_dir of a run",
            where=str(path),
            action="check the path; a run writes run.json as soon as it starts",
        )
    is_running = holder is not None and holder.is_live
    attempts = facts["attempts"]
    if not is_running:
        attempts = completed(path, attempts, holder)
    return RunInfo(
        path=path,
        run_id=facts["run_id"],
        wandb_id=facts["wandb_id"],
        recipe=facts["recipe"],
        created=facts["created"],
        horizon=facts["horizon"],
        attempts=attempts,
        lease=None if holder is None else asdict(holder),
        is_running=is_running,
    )


def status_code(info: RunInfo) -> int:
    """Gives the exit code of the last attempt; 1 while it runs, and when it was killed."""
    return 1 if info.is_running else int(info.attempts[-1]["exit_code"])


def read_run_file(path: Path) -> dict[str, Any] | None:
    """Gives the content of a folder's `run.json`, None without one.

    Raises:
        ConfigError: the path is a file, or run.json is damaged, of another schema, or lacks what
            every run writes.
    """
    file = path / "run.json"
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        found = f"run.json has schema {facts['schema']}"
        if facts["schema"] == SCHEMA:
            if not (wrong := _wrong_keys(facts)):
                return facts
            found = f"run.json lacks {', '.join(wrong)}" if facts["attempts"] else "no attempt"
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise ConfigError(
            "a file, or a path through one",
            expected="the folder of a run",
            where=str(path),
            action="name a run's output_dir, or a new folder for a new run",
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        found = f"run.json is damaged ({type(error).__name__}: {error})"
    raise ConfigError(
        found,
        expected=f"the run.json, schema {SCHEMA}, that a run wrote",
        where=str(file),
        action="put back a copy of it, or use a new --output_dir",
    )


def _wrong_keys(facts: dict[str, Any]) -> list[str]:
    """Names what is missing or of another type; a run writes its first attempt when it starts."""
    wrong = [name for name, kind in KEYS.items() if not isinstance(facts.get(name), kind)]
    if not isinstance(facts["attempts"], list) or not facts["attempts"]:
        return [*wrong, "attempts"]
    for number, entry in enumerate(facts["attempts"]):
        is_whole = isinstance(entry, dict) and isinstance(entry.get("attempt"), int)
        if not is_whole or "outcome" not in entry:
            wrong.append(f"attempt {number} with its number and outcome")
        elif entry["outcome"] is not None and not isinstance(entry.get("exit_code"), int):
            wrong.append(f"the exit code of attempt {number}")
    return wrong


def completed(
    path: Path, attempts: list[dict[str, Any]], holder: Holder | None
) -> list[dict[str, Any]]:
    """Gives the attempts; the end of a last one that did not record its own is filled in."""
    if not attempts or attempts[-1]["outcome"] is not None:
        return attempts
    last = {
        **attempts[-1],
        "outcome": "killed",
        "exit_code": 1,
        "error": "the process ended without recording how",
    }
    if holder is not None and holder.attempt == last["attempt"]:
        last["ended"] = _iso(holder.heartbeat)
        last["step"] = max(last.get("step") or 0, holder.step)
    return [*attempts[:-1], {**last, **failure_of_other_rank(path, last["attempt"])}]


def failure_of_other_rank(path: Path, attempt: int) -> dict[str, Any]:
    """Gives how another rank recorded its failure in an attempt, as facts for the attempt's entry.

    {} where none did. Of several the lowest rank counts whose end has a name of its own: one that
    loses the connection to a failed rank only crashes. A record that cannot be read is passed over.
    """
    failures = []
    for file in sorted((path / "failures").glob(f"attempt-{attempt:04d}-rank-*.json")):
        try:
            failure = json.loads(file.read_text(encoding="utf-8"))
            facts = {name: failure[name] for name in ("outcome", "exit_code", "error", "ended")}
            facts |= {"step": failure["step"], "failed_rank": int(failure["rank"])}
            failures.append(facts | {"exit_code": int(failure["exit_code"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning(
                "failures/%s is not counted: %s: %s", file.name, type(error).__name__, error
            )
    failures.sort(key=lambda each: (each["outcome"] == "crashed", each["failed_rank"]))
    return failures[0] if failures else {}


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(timespec="seconds")


def now() -> str:
    """Gives the time in UTC as ISO 8601 text, to the second."""
    return datetime.now(tz=timezone.utc).isoformat(timespec="seconds")
