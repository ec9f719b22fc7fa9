# SPDX-License-Identifier: Apache-2.0
"""What a comparison shows while it runs: a table of all its runs, which one it is at, how long yet.

On a terminal a live table, elsewhere a line every few seconds.
"""

import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mprecipes.tools.compare_plan import Job

PLAIN_SECONDS = 10.0
WAITING, DONE = "waiting", "finished"
OPEN = (WAITING, "running", "elsewhere")
STYLES = {WAITING: "dim", DONE: "green", "running": "bold"}


class Watch:
    """Context manager around all launches.

    Args:
        console: where to write; None shows nothing.
        slots: runs that go on at the same time.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        console: Console | None,
        jobs: Sequence[Job],
        steps: int,
        *,
        slots: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._jobs, self._steps = console, [*jobs], steps
        self._slots, self._clock = slots, clock
        self.states = dict.fromkeys((job.label for job in jobs), WAITING)
        self._at: dict[str, tuple[int, float]] = {}  # step, loss
        self._since: dict[str, tuple[float, int | None]] = {}  # time, the first step it was seen at
        self._seconds: dict[str, list[float]] = {}  # of finished runs, by arm
        self._live: Live | None = None
        self._printed = 0.0

    def __enter__(self) -> "Watch":
        if self._console is not None and self._console.is_terminal:
            self._live = Live(
                get_renderable=self.picture, console=self._console, refresh_per_second=2,
                transient=True,
            )  # fmt: skip
            self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exception)
            self._live = None

    def say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False)

    def wait_for(self, job: Job) -> None:
        """Tells once that another process is training a run."""
        if self.states[job.label] != "elsewhere":
            self.states[job.label] = "elsewhere"
            self.say(f"{self._count(job)}: {job.label}  is being trained elsewhere: waiting for it")

    def begin(self, job: Job) -> None:
        self.states[job.label] = "running"
        self._since[job.label] = (self._clock(), None)
        self._printed = self._clock()
        if self._live is None:
            self.say(self.line(job))

    def record(self, job: Job, record: dict[str, Any]) -> None:
        """Takes one new journal record of a run; a rollback is none."""
        if "step" not in record:
            return
        step = int(record["step"])
        began, first = self._since[job.label]
        self._since[job.label] = (began, step if first is None else first)
        self._at[job.label] = (step, float(record["loss"]))
        if self._live is None and self._clock() - self._printed >= PLAIN_SECONDS:
            self._printed = self._clock()
            self.say(self.line(job))

    def end(self, job: Job, outcome: str, seconds: float | None) -> None:
        """Takes how a run ended; `seconds` is None for one that was not launched now."""
        self.states[job.label] = outcome
        if seconds is not None and outcome == DONE:
            self._seconds.setdefault(job.arm.name, []).append(seconds)
        took = "before" if seconds is None else f"after {seconds:.1f} s"
        self.say(f"{self._count(job)}: {job.label}: {outcome} {took}")

    def _count(self, job: Job) -> str:
        place = [each.label for each in self._jobs].index(job.label)
        return f"run {place + 1} of {len(self._jobs)}"

    def line(self, job: Job) -> str:
        """Gives one run's progress and the time that is left for all."""
        at = self._at.get(job.label)
        progress = "starting" if at is None else f"step {at[0]}/{self._steps}  loss {at[1]:.4f}"
        return f"{self._count(job)}: {job.label}  {progress}  {self._left()}"

    def _left(self) -> str:
        seconds = self.seconds_left()
        if seconds is None:
            return "time left: unknown yet"
        minutes, rest = divmod(round(seconds), 60)
        return f"time left: {minutes}:{rest:02d}"

    def seconds_left(self) -> float | None:
        """Gives the estimate: what runs of an arm took, else what runs took; None before any."""
        every = [value for values in self._seconds.values() for value in values]
        whole: dict[str, float] = {}
        for label, (began, first) in self._since.items():
            step = self._at.get(label, (0, 0.0))[0]
            if self.states[label] == "running" and first is not None and step > first:
                done = (step - first + 1) / self._steps
                whole[label] = (self._clock() - began) / max(done, 1 / self._steps)
        if not every and not whole:
            return None
        typical = fmean(every) if every else fmean(whole.values())
        left = 0.0
        for job in self._jobs:
            known = self._seconds.get(job.arm.name)
            total = fmean(known) if known else whole.get(job.label, typical)
            if self.states[job.label] in (WAITING, "elsewhere"):
                left += total
            elif self.states[job.label] == "running":
                left += max(0.0, total - (self._clock() - self._since[job.label][0]))
        return left / self._slots

    def picture(self) -> Group:
        """Gives the live table: arms down, seeds across."""
        seeds = list(dict.fromkeys(job.seed for job in self._jobs))
        table = Table(title="comparison of precision modes", title_justify="left")
        table.add_column("arm")
        for seed in seeds:
            table.add_column(f"seed {seed}")
        by_arm: dict[str, list[Text]] = {}
        for job in sorted(self._jobs, key=lambda each: seeds.index(each.seed)):
            by_arm.setdefault(job.arm.name, []).append(self._cell(job))
        for name, cells in by_arm.items():
            table.add_row(name, *cells)
        ended = sum(state not in OPEN for state in self.states.values())
        now = next((job for job in self._jobs if self.states[job.label] == "running"), None)
        below = self.line(now) if now else f"{ended} of {len(self._jobs)} runs ended"
        return Group(table, Text(below))

    def _cell(self, job: Job) -> Text:
        state, at = self.states[job.label], self._at.get(job.label)
        text = state if at is None else f"{state}  {at[0]}/{self._steps}  {at[1]:.4f}"
        return Text(text, style=STYLES.get(state, "red"))
