# SPDX-License-Identifier: Apache-2.0
"""What a drill shows: its progress while it runs, its table, and its picture."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from mprecipes.resume.journal import StepRecord
from mprecipes.tools.drill_compare import last_pass

if TYPE_CHECKING:
    from mprecipes.tools.drill import DrillResult

PLAIN_SECONDS = 5.0
INK, MUTED, REFERENCE, BEFORE, AFTER, KILLED = (
    "#1f2430", "#6b7280", "#c3c9d4", "#d97706", "#0f766e", "#b91c1c",
)  # fmt: skip


class Watch:
    """Shows step and loss of the launch that is running: a bar, or a line every few seconds.

    Args:
        console: where to write; None shows nothing.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._name, self._printed = "", 0.0
        self._total: int | None = None

    def say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, highlight=False)

    @contextlib.contextmanager
    def following(self, name: str, run: Path) -> Iterator[None]:
        """Shows one launch under a name until it ends."""
        self._name, started = name, time.monotonic()
        if self._console is None:
            yield
            return
        self.say(f"{name:<10} launching into {run.name}/")
        self._printed = started
        if not self._console.is_terminal:
            yield
        else:
            columns = (
                TextColumn("{task.description:<10}"), BarColumn(bar_width=30), MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}"), TimeElapsedColumn(),
            )  # fmt: skip
            with Progress(*columns, console=self._console, transient=True) as self._progress:
                self._task = self._progress.add_task(name, total=self._total, loss="starting")
                yield
            self._progress = None
        self.say(f"{name:<10} ended after {time.monotonic() - started:.1f} s")

    def expect(self, total: int) -> None:
        """Sets the number of steps of the launches that follow."""
        self._total = total

    def record(self, record: dict[str, Any]) -> None:
        """Takes one new journal record."""
        step = record.get("step")
        loss = f"loss {float(record.get('loss', 'nan')):.4f}"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, loss=loss)
        elif self._console is not None and time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._printed = time.monotonic()
            self.say(f"{self._name:<10} step {step}  {loss}")


def _clip(text: str, width: int = 44) -> str:
    return escape(text if len(text) <= width else text[: width - 3] + "...")


def table_of(result: "DrillResult") -> Table:
    """Gives the drill's table: one row per compared thing."""
    title = f"drill of {result.recipe} ({result.status}), {result.precision}"
    table = Table(title=escape(title))
    table.add_column("compared with the uninterrupted run")
    table.add_column("count", justify="right")
    table.add_column("result")
    table.add_column("first difference")
    for row in result.rows:
        difference = row.first_difference
        if row.equal:
            verdict = "[green]equal[/]" if row.compared else "none to compare"
        else:
            verdict = (
                f"[bold red]{row.different:,} different[/]" if row.compared else "[red]nothing[/]"
            )
        first = Table.grid(padding=(0, 1))
        if difference:
            first.add_row(_clip(difference["where"]), "")
            first.add_row("expected", _clip(difference["expected"]))
            first.add_row("found", _clip(difference["found"]))
        table.add_row(
            row.what, f"{row.compared:,} {row.unit}", verdict, first if difference else ""
        )
    return table


def summary_of(result: "DrillResult") -> str:
    """Gives the lines under the table: kills, times, verdict."""
    kills = "; ".join(
        f"killed {'in the save' if kill.during == 'save' else 'at the end'} of step {kill.step}, "
        + (f"went on from the checkpoint of step {kill.resumed_from}" if kill.resumed_from else
           "started again, as there was no checkpoint yet")
        for kill in result.kills
    )  # fmt: skip
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in result.seconds.items())
    equal = sum(row.equal for row in result.rows)
    verdict = (
        f"EQUAL: all {len(result.rows)} comparisons, bit for bit, over {result.last_step} steps"
        if result.equal
        else f"DIFFERENT: {len(result.rows) - equal} of {len(result.rows)} comparisons"
    )
    seed = "" if result.kill_seed is None else f" (drawn with --kill_seed {result.kill_seed})"
    return (
        f"{kills}{seed}\nwall time: {seconds}\n{verdict}\n"
        f"written: {result.folder / 'drill.json'} and {result.folder / 'drill.png'}"
    )


@dataclass(frozen=True)
class Picture:
    """What the picture is drawn from: losses by step, per attempt, and where kills fell."""

    title: str
    verdict: str
    equal: bool
    reference: dict[int, float]
    attempts: list[dict[int, float]]
    kills: list[tuple[int, int, str]] = field(default_factory=list)  # step, resumed from, during

    @classmethod
    def of(
        cls,
        result: "DrillResult",
        reference: dict[int, list[StepRecord]],
        interrupted: dict[int, list[StepRecord]],
    ) -> "Picture":
        processes = f"{result.num_processes} process" + ("es" if result.num_processes > 1 else "")
        return cls(
            title=f"{result.recipe}, {result.precision}, {processes}",
            verdict="bit for bit equal" if result.equal else "DIFFERENT",
            equal=result.equal,
            reference={step: record.loss for step, record in last_pass(reference).items()},
            attempts=[
                {record.step: record.loss for record in records}
                for _, records in sorted(interrupted.items())
            ],
            kills=[(kill.step, kill.resumed_from, kill.during) for kill in result.kills],
        )


def draw(path: Path, picture: Picture) -> None:
    """Writes both loss curves, the kills, and the difference of every step to a PNG.

    No display is needed, and pyplot's global state is not touched.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 6), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
    figure.suptitle(f"Killed, resumed, and {picture.verdict}", fontsize=16, weight="bold",
                    color=INK if picture.equal else KILLED)  # fmt: skip
    upper.set_title(picture.title, fontsize=10.5, color=MUTED)
    _draw_losses(upper, picture)
    _draw_difference(lower, picture)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        axes.tick_params(colors=MUTED, labelsize=9)
        axes.grid(axis="y", color="#eceef2", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    figure.savefig(path, metadata={"Software": "mprecipes drill"})


def _draw_losses(axes: Any, picture: Picture) -> None:
    from matplotlib.transforms import blended_transform_factory

    axes.plot(
        *zip(*picture.reference.items(), strict=True), color=REFERENCE, linewidth=8,
        solid_capstyle="round", label="uninterrupted run", zorder=2,
    )  # fmt: skip
    for attempt, losses in enumerate(picture.attempts):
        if losses:
            axes.plot(
                *zip(*losses.items(), strict=True), zorder=4 if attempt else 3,
                color=AFTER if attempt else BEFORE, linewidth=1.5 if attempt else 3.4,
                marker="o" if len(losses) <= 40 else None, markersize=4 if attempt else 7,
                label=("before the kill", "after the resume")[attempt] if attempt < 2 else None,
            )  # fmt: skip
    axes.margins(x=0.02)
    mixed = blended_transform_factory(axes.transData, axes.transAxes)
    right_edge = max(picture.reference) * 0.62
    for index, (step, resumed_from, during) in enumerate(picture.kills):
        if resumed_from < step:
            axes.axvspan(resumed_from, step, color=AFTER, alpha=0.09, linewidth=0, zorder=1,
                         label="replayed steps" if index == 0 else None)  # fmt: skip
        axes.axvline(step, color=KILLED, linewidth=1.4, zorder=5)
        height, left = 0.95 - 0.17 * (index % 4), step > right_edge
        where = f"in the save of step {step}" if during == "save" else f"after step {step}"
        source = f"resumed from step {resumed_from}" if resumed_from else "started again"
        axes.annotate(
            f"SIGKILL {where}\n{source}", (step, height), xycoords=mixed,
            xytext=(-8 if left else 8, 0), textcoords="offset points", va="top",
            ha="right" if left else "left", color=KILLED, fontsize=9.5, linespacing=1.35, zorder=6,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
        )  # fmt: skip
        if resumed_from in picture.reference:
            axes.plot(
                resumed_from, picture.reference[resumed_from], marker="D", markersize=7, zorder=7,
                linestyle="none", color="white", markeredgecolor=AFTER, markeredgewidth=1.8,
                label="checkpoint it resumed from" if index == 0 else None,
            )  # fmt: skip
    axes.set_ylabel("training loss", color=INK)
    axes.legend(frameon=False, fontsize=9.5, loc="best", labelcolor=INK)


def _difference(found: float, expected: float) -> float:
    return 0.0 if found.hex() == expected.hex() else found - expected


def _draw_difference(axes: Any, picture: Picture) -> None:
    points = [
        (step, _difference(loss, picture.reference[step]), attempt)
        for attempt, losses in enumerate(picture.attempts)
        for step, loss in losses.items()
        if step in picture.reference
    ]
    axes.axhline(0, color=REFERENCE, linewidth=2, zorder=2)
    for after, color in ((False, BEFORE), (True, AFTER)):
        chosen = [(step, value) for step, value, attempt in points if (attempt > 0) == after]
        if chosen:
            size = 2.6 if after else 6.0
            axes.plot(*zip(*chosen, strict=True), linestyle="none", marker="o", markersize=size,
                      color=color, zorder=4 if after else 3)  # fmt: skip
    different = sum(value != 0 for _, value, _ in points)
    if different:
        text = f"{different} of {len(points)} differ"
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    else:
        text = f"exactly 0 at all {len(points)} recorded steps, replayed ones included"
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])
    axes.text(
        0.995, 0.94, text, transform=axes.transAxes, ha="right", va="top", fontsize=9.5,
        color=KILLED if different else AFTER, zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    )  # fmt: skip
    for step, _, _ in picture.kills:
        axes.axvline(step, color=KILLED, linewidth=1.4, zorder=5)
    axes.set_ylabel("difference", color=INK)
    axes.set_xlabel("optimizer step", color=INK)
