# SPDX-License-Identifier: Apache-2.0
"""Reads the resume report of one attempt, and says whether it is whole and what it concluded."""

import json
import re
from pathlib import Path
from typing import Any

from mprecipes.errors import ConfigError
from mprecipes.resume.checks import Check
from mprecipes.resume.policy import CHECKS

KEYS = {
    "verdict": str, "attempt": int, "checkpoint": str | None, "step": int, "checks": list,
    "replayed_steps": int,
}  # fmt: skip
VERDICTS = ("on_probation", "released", "released_with_warnings", "halted")


def report_files(run: Path) -> list[tuple[int, Path]]:
    """Gives (attempt, file) of every resume report of a run, in order, and of no other file."""
    found = []
    for path in (run / "resume").glob("attempt-*.json"):
        if number := re.fullmatch(r"attempt-(\d+)", path.stem):
            found.append((int(number[1]), path))
    return sorted(found)


def read_report(run: Path, attempt: int) -> tuple[dict[str, Any], list[Check]]:
    """Gives a report's facts and its checks.

    Raises:
        ConfigError: there is none of this attempt, or it is not whole.
    """
    path = run / "resume" / f"attempt-{attempt:04d}.json"
    known = [number for number, _ in report_files(run)]
    if not path.exists():
        raise ConfigError(
            f"no resume report of attempt {attempt}",
            expected=f"one of attempts {', '.join(map(str, known)) or '(none was resumed)'}",
            where=str(path),
            action="name an attempt that resumed; `mprecipes status` lists them",
        )
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        wrong = [name for name, kind in KEYS.items() if not isinstance(report.get(name), kind)]
        checks = [Check(**each) for each in report["checks"]] if not wrong else []
    except (ValueError, TypeError) as error:
        report, wrong, checks = {}, [f"not a report ({error})"], []
    names = [check.name for check in checks]
    wrong += [f"check {name}" for name in CHECKS if checks and names.count(name) != 1]
    if report and report.get("verdict") not in VERDICTS:
        wrong.append("verdict")
    if wrong:
        raise ConfigError(
            f"missing or malformed: {', '.join(wrong)}",
            expected="the keys of docs/resume.md and the five checks once each",
            where=str(path),
            action="it changed after it was written, or an older version wrote it: restore it",
        )
    return report, checks


def concluded_well(report: dict[str, Any]) -> bool:
    """Whether the attempt was released, with or without warnings."""
    return str(report["verdict"]).startswith("released")
