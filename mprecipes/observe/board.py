# SPDX-License-Identifier: Apache-2.0
"""One place a recipe tells what happened: the console, the metrics file and the rates follow."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from mprecipes.observe.alerts import Alerts
from mprecipes.observe.memory import peak_memory
from mprecipes.observe.metrics import METRICS, MetricsLog, ThroughputMeter
from mprecipes.observe.policy import watch_policy
from mprecipes.observe.progress import Progress

WRONG = (  # counts of what went wrong after a save
    "aftercare_errors", "milestone_errors", "mirror_errors", "mirror_skipped", "scrub_problems",
    "cleanup_errors", "quarantined",
)  # fmt: skip


class Run(Protocol):
    """What is used of a run folder."""

    path: Path
    run_id: str
    attempt: int
    is_main: bool


class Options(Protocol):
    """What is used of a recipe's config."""

    @property
    def max_steps(self) -> int: ...
    @property
    def logging_steps(self) -> int: ...
    @property
    def watch(self) -> dict[str, Any] | None: ...


class Record(Protocol):
    """What is used of a journal record."""

    @property
    def step(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def loss_scale(self) -> float | None: ...
    @property
    def updates(self) -> int: ...
    @property
    def step_seconds(self) -> float: ...


class Save(Protocol):
    """What is used of a save's report."""

    @property
    def step(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def blocked_seconds(self) -> float: ...
    @property
    def waited_seconds(self) -> float: ...
    @property
    def kept(self) -> bool: ...
    @property
    def error(self) -> str | None: ...
    @property
    def note(self) -> str | None: ...


class Tracker(Protocol):
    """What is used of a `Tracking`."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def reference(self, name: str, kind: str, files: Mapping[str, Path]) -> None: ...
    def alert(self, title: str, text: str) -> None: ...
    def news(self) -> list[str]: ...


class Board:
    """Context manager around the training loop; fed on every rank, shown by the main process.

    Args:
        run: its folder gets `metrics.jsonl`.
        start_step: steps done before this process.
        tracking: gets what the metrics file gets, and says on the console how it fares.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        run: Run,
        config: Options,
        start_step: int,
        *,
        tracking: Tracker | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._run, self._tracking = run, tracking
        self._metrics = MetricsLog(
            run.path / "metrics.jsonl", enabled=run.is_main, attempt=run.attempt
        )
        self._progress = Progress(
            config.max_steps,
            start_step,
            enabled=run.is_main,
            logging_steps=config.logging_steps,
        )
        self._throughput = ThroughputMeter()
        self._config, self._clock = config, clock
        self._last_checkpoint: int | None = start_step or None
        self._failed_saves = 0
        self._alerts, self._num_alerts = Alerts(watch_policy(config)), 0
        self._counts: dict[str, float] = {}
        self._started = self._clock()

    def __enter__(self) -> "Board":
        self._progress.__enter__()
        self._started = self._clock()
        return self

    def __exit__(self, *exception: object) -> None:
        self._show_news()
        self._progress.__exit__(*exception)
        self._metrics.close()

    def lap(self) -> float:
        """Gives the seconds since the last lap, pauses left out: the duration of one step."""
        now = self._clock()
        seconds, self._started = now - self._started, now
        return seconds

    def step(
        self, record: Record, news: Mapping[str, float] = {}, notes: Iterable[str] = ()
    ) -> None:
        """Shows an optimizer step, and logs it every `logging_steps` and at the end.

        What looks wrong with its loss or gradient norm is an alert.

        Args:
            news: metrics that were measured in this step alone; logged and shown at once.
            notes: lines that are shown whatever the step.
        """
        if news:
            self.log(record.step, news)
        for note in notes:
            self._progress.note(note)
        if not record.skipped:
            for title, text in self._alerts.judge(record.loss, record.grad_norm):
                self.alert(record.step, title, text)
        self._throughput.update(record.tokens, record.step_seconds)
        rate, seconds = self._throughput.tokens_per_second, self._throughput.step_seconds
        self._progress.update(
            record.step,
            loss=record.loss,
            tokens_per_second=rate,
            learning_rate=record.learning_rate,
            last_checkpoint_step=self._last_checkpoint,
        )
        if record.step % self._config.logging_steps and record.step != self._config.max_steps:
            return
        values = {
            "train/loss": record.loss,
            "train/grad_norm": record.grad_norm,
            "train/learning_rate": record.learning_rate,
            **peak_memory(),
        }
        if rate is not None and seconds is not None:
            values |= {"perf/tokens_per_second": rate, "perf/step_seconds": seconds}
        if record.loss_scale is not None or record.updates != record.step:
            values["precision/skipped_steps"] = record.step - record.updates
        if record.loss_scale is not None:
            values["precision/loss_scale"] = record.loss_scale
        self._keep(record.step, values)
        self._show_news()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs values of one group by metric name, and shows them on a line of their own."""
        self._keep(step, values)
        group = next(iter(values)).partition("/")[0]
        shown = [
            f"{name.partition('/')[2]} {value if isinstance(value, int) else f'{value:.4f}'}"
            for name, value in values.items()
        ]
        self._progress.note(f"step {step}  {group}: {'  '.join(shown)}")

    def numerics(self, step: int, values: Mapping[str, float]) -> None:
        """Logs what was measured of a step's numbers, without a line on the console; {} is none."""
        if values:
            self._keep(step, values)

    def alert(self, step: int, title: str, text: str) -> None:
        """Counts and logs an alert, shows it, and leaves it to the trackers."""
        self._num_alerts += 1
        self._keep(step, {"train/alerts": self._num_alerts})
        self._progress.note(f"step {step}  alert: {title}: {text}")
        if self._tracking is not None:
            self._tracking.alert(f"{title}: {self._run.path.name}", f"step {step}: {text}")

    def saved(self, saves: Iterable[Save], step: int = 0, counts: Mapping[str, int] = {}) -> None:
        """Tells what became of saves: published, found published already, or failed and why.

        Args:
            step: this is told at.
            counts: of what followed them, such as `mirror_errors`; logged where one has changed,
                and shown where it counts something that went wrong.
        """
        for save in saves:
            self._saved(save)
        changed = {
            name: count
            for name, count in counts.items()
            if f"checkpoint/{name}" in METRICS and count != self._counts.get(name, 0)
        }
        if not changed:
            return
        self._counts |= changed
        self._keep(step, {f"checkpoint/{name}": count for name, count in changed.items()})
        wrong = [f"{name} {count}" for name, count in changed.items() if name in WRONG]
        if wrong:
            self._progress.note(f"step {step}  after saves: {', '.join(wrong)}; see the log")

    def _saved(self, save: Save) -> None:
        if save.error is not None:
            self._failed_saves += 1
            self._keep(save.step, {"checkpoint/failed_saves": self._failed_saves})
            self._progress.note(f"step {save.step}  not saved: {save.error}")
            return
        self._last_checkpoint = save.step
        if save.kept:
            return  # an earlier attempt published it
        values = {
            "checkpoint/step": save.step,
            "checkpoint/bytes": save.bytes,
            "checkpoint/save_seconds": save.seconds,
            "checkpoint/stall_seconds": save.blocked_seconds,
            "checkpoint/wait_seconds": save.waited_seconds,
        }
        self._keep(save.step, values)
        if self._tracking is not None:
            name = f"step-{save.step:08d}"
            manifest = self._run.path / "checkpoints" / name / "manifest.json"
            files = {f"{name}/manifest.json": manifest}
            self._tracking.reference(f"checkpoints-{self._run.run_id}", "checkpoint", files)
        if save.note is not None:
            self._progress.note(save.note)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves an evaluation or a save out of steps and rates."""
        began = self._clock()
        try:
            yield
        finally:
            self._started += self._clock() - began

    def _keep(self, step: int, values: Mapping[str, float]) -> None:
        self._metrics.log(step, values)
        if self._tracking is not None:
            self._tracking.log(step, values)

    def _show_news(self) -> None:
        for line in self._tracking.news() if self._tracking is not None else ():
            self._progress.note(line)
