# SPDX-License-Identifier: Apache-2.0
"""What earlier attempts of a run concluded, and what that rules out: of reports and `run.json`."""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from mprecipes.checkpoint.manifest import Manifest
from mprecipes.errors import ConfigError


def facts_of_attempts(run: Path) -> dict[int, dict[str, Any]]:
    """Gives what each earlier attempt noted in `run.json` about how it computed."""
    return {entry["attempt"]: entry["contract"] for entry in _entries(run) if "contract" in entry}


def verdicts(reports: Path) -> dict[int, tuple[str, int]]:
    """Gives, by attempt, its verdict and the step that was released when it began.

    Raises:
        ConfigError: a report cannot be read: whether its attempt was halted is then unknown.
    """
    found: dict[int, tuple[str, int]] = {}
    for path in reports.glob("attempt-*.json"):
        try:
            each = json.loads(path.read_text("utf-8"))
            found[int(each["attempt"])] = (str(each["verdict"]), each.get("base", each["step"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"not a resume report ({type(error).__name__}: {error})",
                expected="the JSON object that the attempt wrote",
                where=f"{reports.name}/{path.name}",
                action="move it out of the folder: the attempt then counts as one without a "
                "verdict, and what it saved on probation is judged again",
            ) from error
    return dict(sorted(found.items()))


def halted(reports: Path) -> set[int]:
    """Gives the attempts that did not go on as they should: no measure for the next one."""
    return {number for number, (verdict, _) in verdicts(reports).items() if verdict == "halted"}


def released_base(manifest: Manifest, reports: Path) -> int:
    """Gives the step that was released last: the checkpoint's own unless it is provisional still.

    One saved on probation is released with its attempt, or with a later one that went on from the
    same base.
    """
    provisional = manifest.raw.get("provisional")
    if not provisional:
        return manifest.step
    for number, (verdict, base) in verdicts(reports).items():
        chain = number >= provisional["attempt"] and base == provisional["base"]
        if chain and verdict.startswith("released"):
            return manifest.step
    return provisional["base"]


def doubt(reports: Path) -> Callable[[Manifest], str | None]:
    """Gives the function that says why a checkpoint is not to be resumed from; None if it may.

    A provisional one is doubtful when the newest attempt from its base was halted.
    """
    known = verdicts(reports)

    def why(manifest: Manifest) -> str | None:
        provisional = manifest.raw.get("provisional")
        if not provisional or released_base(manifest, reports) == manifest.step:
            return None
        chain = [n for n, (_, base) in known.items() if base == provisional["base"]]
        newest = max((n for n in chain if n >= provisional["attempt"]), default=-1)
        if known.get(newest, ("", 0))[0] != "halted":
            return None
        return f"saved on probation by attempt {provisional['attempt']}; attempt {newest} is halted"

    return why


def was_chosen(run: Path, reports: Path, step: int) -> bool:
    """Whether an attempt already went on from `--resume_from step` and was released.

    So that the same command, launched again after a preemption, does not throw its work away.
    """
    known = verdicts(reports)
    return any(
        entry.get("resume_from") == step
        and known.get(entry["attempt"], ("", 0))[0].startswith("released")
        for entry in _entries(run)
    )


def _entries(run: Path) -> list[dict[str, Any]]:
    path = run / "run.json"
    return json.loads(path.read_text("utf-8"))["attempts"] if path.exists() else []


def adopted_from(manifest: Manifest, run: Path, run_id: str, *, is_trained: bool) -> dict[str, str]:
    """Gives, for run.json, the other run whose checkpoint is gone on from; {} for its own.

    A new folder goes on from what its mirror holds of the run that was lost. A run that has been
    trained has checkpoints of its own, and those it went on from.

    Args:
        run: its folder.
        is_trained: some attempt in this folder made a step.

    Raises:
        ConfigError: somebody put a checkpoint of another run here.
    """
    if manifest.run_id == run_id:
        return {}
    if is_trained and manifest.run_id not in {entry.get("adopted") for entry in _entries(run)}:
        raise ConfigError(
            f"{manifest.folder.name} is a checkpoint of run {manifest.run_id}",
            expected=f"checkpoints of this run, {run_id}",
            where=f"checkpoints/{manifest.folder.name}/manifest.json",
            action="take it out of checkpoints/; a new run can start from its weights with "
            "--model_name_or_path FOLDER",
        )
    return {"adopted": manifest.run_id}


def refuse_to_end_before(
    manifest: Manifest, published: Collection[int], max_steps: int | None
) -> None:
    """Refuses a last step that lies before the checkpoint: it could only be said to be finished.

    Args:
        published: steps of all checkpoints.
        max_steps: the recipe's option; None where it has none.

    Raises:
        ConfigError: naming both steps, and a checkpoint to go back to where there is one.
    """
    if max_steps is None or manifest.step <= max_steps:
        return
    back = max((step for step in published if step <= max_steps), default=None)
    raise ConfigError(
        f"max_steps {max_steps}, and the run is at step {manifest.step}",
        expected=f"{manifest.step} or more",
        where=f"max_steps, checkpoints/{manifest.folder.name}",
        action="raise --max_steps" + (f", or add --resume_from {back}" if back is not None else ""),
    )
