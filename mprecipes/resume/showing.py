# SPDX-License-Identifier: Apache-2.0
"""What a person, W&B and a later launch are told about a verdict: table, metrics, ways on."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from mprecipes.resume.checks import Check, Report

COLUMNS = ("name", "verdict", "policy", "expected", "found", "tolerance", "seconds", "meaning")
WIDTH = 118
Announce = Callable[[Report, str, Mapping[str, float]], None]
STORY = {
    "released": "released: the run continues",
    "released_with_warnings": "released with warnings: the run continues",
    "halted": "halted: nothing was deleted",
    "on_probation": "on probation",
}


class Tracker(Protocol):
    """What is used of `observe.tracking.Tracking`."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]
    ) -> None: ...
    def report(self, name: str, kind: str, file: Path) -> None: ...


def announcer(run_id: str, tracker: Tracker | None) -> Announce:
    """Gives the function that tells a verdict on the console and to W&B; main process only.

    W&B gets the numbers under `resume/`, the table `resume/checks` and the report as an artifact;
    an alert on a halt comes from the error that ends the run.
    """

    def announce(report: Report, verdict: str, numbers: Mapping[str, float]) -> None:
        if report.path is None:
            return
        facts = {"verdict": verdict, **report.facts}
        with contextlib.suppress(OSError):  # a console that is gone stops no run
            print(render(facts, report.checks), end="", flush=True)
        if tracker is not None:
            observed = int(numbers.get("resume/observed_steps", 0))
            step = int(report.facts.get("step") or 0) + observed  # curves never go back
            rows = [[_cell(getattr(check, name)) for name in COLUMNS] for check in report.checks]
            tracker.log(step, numbers)
            tracker.table(step, "resume/checks", ["check", *COLUMNS[1:]], rows)
            tracker.report(f"resume-{run_id}", "resume-report", report.path)

    return announce


class _ConsoleText(io.StringIO):
    """Text for this process's console: rich draws its lines with the characters that one has."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stdout.encoding or "utf-8"


def render(facts: Mapping[str, Any], checks: Iterable[Check]) -> str:
    """Gives the table of a report as plain text."""
    where = facts.get("checkpoint") or "step 0"
    title = f"resume of attempt {facts.get('attempt')} from {where}: {STORY[facts['verdict']]}"
    table = Table()
    for column in ("check", "verdict", "policy", "s", "what was found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(
            check.name, check.verdict, check.policy, f"{check.seconds:.2f}", summary(check)
        )
    text = _ConsoleText()
    Console(file=text, width=WIDTH, color_system=None, highlight=False).print(table, markup=False)
    return f"{title}\n{text.getvalue()}"


def summary(check: Check) -> str:
    """Gives what a check found in one or two lines."""
    if check.verdict in ("failed", "warned"):
        return f"{_words(check.found)[:400]}; {check.meaning}"
    if isinstance(check.expected, dict):
        return ", ".join(check.expected) or "nothing to compare with"
    return _words(check.found)[:160]


def ways_on(attempt: int, earlier: Sequence[int], *, environment: bool) -> str:
    """Gives the commands to try after a halt, to be added to what to look at first."""
    lines = ["", "    launch again with one of"]
    if earlier:
        lines.append(f"      --resume_from {max(earlier)}   the checkpoint before this one")
    if environment:
        lines.append("      --accept changed_environment   the change is meant")
    lines += [
        "    or look closer with",
        f"      mprecipes verify RUN --resume_report {attempt}",
        "      mprecipes drill RECIPE ...   does a resume on this machine repeat the run at all?",
    ]
    return "\n".join(lines)


def _words(value: Any) -> str:
    """Gives a value as people read it; names that hold nothing are left out."""
    if isinstance(value, dict):
        facts = [(name.replace("_", " "), each) for name, each in value.items()]
        return ", ".join(f"{name} {_words(each)}" for name, each in facts if each not in ([], {}))
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return f"{value:,}" if type(value) in (int, float) else _cell(value)


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
