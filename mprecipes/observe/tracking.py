# SPDX-License-Identifier: Apache-2.0
"""Curves, config, reports and alerts in W&B and TensorBoard, without ever holding up a training.

Rank 0 only. Everything is left with a courier (a bounded queue and a daemon thread), which also
opens and closes the tracker: one that is slow, refuses or dies costs rows, which are counted and
told, and at the end `close_seconds`. `metrics.jsonl` holds every row in any case.

W&B, through accelerate's tracker: one run per run folder for life, under its `wandb_id`. Each row
carries `train/step`, the x axis of every curve, and `resume/attempt`; W&B's own step only counts
rows, so that steps repeated after a resume are kept, in the order they were made. Its files are in
`<run folder>/wandb/`, or where WANDB_DIR says. Without a login it logs offline and never prompts;
WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and WANDB_NAME are respected. Console output is not
captured: a client that hangs would stop whoever prints.

TensorBoard: `<run folder>/tensorboard/attempt-NNNN/`, a curve of its own for each attempt.
"""

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from accelerate import PartialState
from accelerate.tracking import TensorBoardTracker, WandBTracker

from mprecipes.errors import RecipeError
from mprecipes.observe.client import end_helper, set_defaults, why_offline
from mprecipes.observe.courier import Courier
from mprecipes.observe.flat import flatten
from mprecipes.observe.policy import Options, needing_trackers, watch_policy

PROJECT = "mprecipes"
REPORT_BYTES = 1 << 20  # a larger file is no report, and is logged by reference
CLOSE_SECONDS, GRACE_SECONDS = 20.0, 5.0
Level = Literal["INFO", "WARN", "ERROR"]


class Run(Protocol):
    """What is used of a run folder."""

    path: Path
    run_id: str
    wandb_id: str
    attempt: int
    is_main: bool


class Sink(Protocol):
    """Where a courier takes things; may block and may raise."""

    def row(self, step: int, values: Mapping[str, float]) -> None: ...
    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None: ...
    def artifact(self, name: str, kind: str, files: Mapping[str, Path], copied: bool) -> None: ...
    def alert(self, title: str, text: str, level: Level) -> None: ...
    def close(self, outcome: str, exit_code: int) -> None: ...


Say = Callable[[str], None]
Opener = Callable[[dict[str, Any], Say], Sink]


class Tracking:
    """Context manager around a recipe's run; made on every rank, does something on the main one.

    Nothing is started before `begin`. An exception that passes through decides how the run ends in
    W&B, and a `RecipeError` (halted, preempted, ...) sends an alert.

    Args:
        report_to: of "wandb", "tensorboard" and "jsonl" (`metrics.jsonl`, which is written in any
            case), or "none" alone.
        project: of W&B; None is WANDB_PROJECT or "mprecipes".
        entity: user or team in W&B; None is WANDB_ENTITY or the user's default.
        openers: how each sink is opened, for other trackers and for tests.
        capacity: rows that may wait for a sink.
        close_seconds: what the end of a run may wait for each sink.
        grace_seconds: and after that, once the client's helper process was ended.

    Raises:
        ConfigError: `report_to` names something else, or a package is not installed.
    """

    def __init__(
        self,
        run: Run,
        report_to: Sequence[str],
        *,
        project: str | None = None,
        entity: str | None = None,
        openers: Mapping[str, Opener] | None = None,
        capacity: int = 10_000,
        close_seconds: float = CLOSE_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._run, self._names = run, needing_trackers(report_to)
        self._capacity, self._close_seconds = capacity, close_seconds
        self._grace_seconds = grace_seconds
        self._is_real = openers is None
        self._openers: Mapping[str, Opener] = openers or {
            "wandb": lambda config, say: _WandB(run, config, project, entity, say),
            "tensorboard": lambda config, say: _TensorBoard(run, config),
        }
        self._couriers: dict[str, Courier[Sink]] = {}
        self._news: deque[str] = deque()
        self._failed: set[str] = set()
        self._told_lost = 0

    @property
    def lost(self) -> int:
        """Rows that did not reach a sink."""
        return sum(courier.lost for courier in self._couriers.values())

    def begin(self, config: Mapping[str, Any]) -> None:
        """Opens the trackers in the background, with a config that is flattened for them."""
        if not self._run.is_main or self._couriers:
            return
        flat = flatten(config)
        if self._is_real and self._names:
            PartialState()  # accelerate's trackers ask for one, which a tool has not made yet
        if self._is_real and "wandb" in self._names:
            set_defaults(_folder(self._run))
            # Not on the courier's thread: a loader worker that is forked in the middle of an import
            # would wait for ever for a lock that nobody holds.
            import wandb  # noqa: F401
        for name in self._names:
            opener = self._openers[name]
            self._couriers[name] = Courier(
                lambda opener=opener: opener(flat, self._news.append),  # type: ignore[misc]
                capacity=self._capacity,
                on_error=lambda error, name=name: self._note(name, error),  # type: ignore[misc]
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Leaves a row of plain numbers under their metric names; never waits."""
        row = dict(values)
        self._send(lambda sink: sink.row(step, row))

    def table(
        self, step: int, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]
    ) -> None:
        """Leaves a table, such as the checks of a resume, under a metric name; never waits."""
        head, body = list(columns), [list(row) for row in rows]
        self._send(lambda sink: sink.table(step, name, head, body))

    def reference(self, name: str, kind: str, files: Mapping[str, Path]) -> None:
        """Leaves an artifact that points at files by `file://` URI; nothing is read or copied.

        Args:
            name: letters, digits, `-`, `_` and `.`; the same name again is its next version.
            files: what they are called in the artifact, and where they are.
        """
        absolute = {path: file.absolute() for path, file in files.items()}
        self._send(lambda sink: sink.artifact(name, kind, absolute, False), counted=False)

    def report(self, name: str, kind: str, file: Path) -> None:
        """Leaves a small JSON report, uploaded as an artifact; one over 1 MiB by reference."""
        files = {file.name: file.absolute()}
        self._send(lambda sink: sink.artifact(name, kind, files, True), counted=False)

    def alert(self, title: str, text: str, level: Level = "WARN") -> None:
        """Leaves an alert, which W&B sends by mail or chat."""
        self._send(lambda sink: sink.alert(title[:63], text, level), counted=False)

    def news(self) -> list[str]:
        """Gives lines for the console that came up since the last call."""
        lines = [self._news.popleft() for _ in range(len(self._news))]
        if self.lost >= max(1, 2 * self._told_lost):
            self._told_lost = self.lost
            lines.append(f"tracking: {self.lost} rows lost; metrics.jsonl has them")
        return lines

    def close(self, error: BaseException | None = None) -> None:
        """Sends what is left and ends the trackers, within `close_seconds` each; raises nothing."""
        outcome, exit_code = "finished", 0
        if isinstance(error, RecipeError):
            outcome, exit_code = error.outcome, error.exit_code
        elif error is not None:
            outcome, exit_code = "crashed", 1
        if isinstance(error, RecipeError) and exit_code:
            level: Level = "WARN" if outcome == "preempted" else "ERROR"
            self.alert(f"{outcome}: {self._run.path.name}", str(error), level)
        for name, courier in self._couriers.items():
            done = courier.close(
                lambda sink: sink.close(outcome, exit_code),
                self._close_seconds,
                hurry=end_helper if name == "wandb" else lambda: None,
                grace_seconds=self._grace_seconds,
            )
            if not done:
                seconds = f"{self._close_seconds:.0f} s"
                self._news.append(f"tracking: {name} did not end within {seconds}")
        with contextlib.suppress(OSError):  # a console that is gone stops no run
            for line in self.news():
                print(line, flush=True)

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self.close(error)

    def _send(self, job: Callable[[Sink], object], *, counted: bool = True) -> None:
        for courier in self._couriers.values():
            courier.send(job, counted=counted)

    def _note(self, name: str, error: BaseException) -> None:
        if name not in self._failed:  # the rest is counted
            self._failed.add(name)
            self._news.append(f"tracking: {name}: {_one_line(error)}; the training goes on")


def track(run: Run, config: Options) -> Tracking:
    """Gives the tracking that the option `watch` of a recipe's config asks for.

    Raises:
        ConfigError: the option is malformed, or a package is not installed.
    """
    policy = watch_policy(config)
    return Tracking(run, policy.report_to, project=policy.project, entity=policy.entity)


class _WandB:
    """A run of W&B, opened when it is made: online if that can be, else offline."""

    def __init__(
        self,
        run: Run,
        config: dict[str, Any],
        project: str | None,
        entity: str | None,
        say: Say,
    ) -> None:
        import wandb

        self._wandb, self._attempt, self._say = wandb, run.attempt, say
        quiet = self._wandb.Settings(silent=True)
        reason = why_offline(self._wandb.setup(quiet).settings)
        options = {
            "id": run.wandb_id,
            "resume": "allow",
            "name": os.environ.get("WANDB_NAME", run.path.resolve().name),
            "entity": entity,
            "dir": str(_folder(run)),
            "settings": wandb.Settings(console="off", silent=True),
        }
        project = project or os.environ.get("WANDB_PROJECT", PROJECT)
        self._tracker = WandBTracker(project, **options, mode="offline" if reason else None)
        try:
            self._tracker.start()
        except Exception as error:
            if reason:
                raise
            reason = f"not reached: {_one_line(error)}"
            end_helper()  # it holds on to the run id
            with contextlib.suppress(OSError, SystemExit):  # the goodbye finds nobody
                self._wandb.teardown()
            self._wandb.setup(quiet)
            self._tracker = WandBTracker(project, **options, mode="offline")
            self._tracker.start()
        self._run = self._tracker.tracker
        self._sync = f"wandb sync {Path(self._run.dir).parent}"
        if self._run.offline:
            because = f" ({reason})" if reason else ""
            say(f"W&B: offline{because}; to upload: {self._sync}")
        elif not self._run.disabled:
            say(f"W&B: {self._run.url}")
        self._run.define_metric("*", step_metric="train/step")
        self._tracker.store_init_configuration(config)

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        self._tracker.log({"train/step": step, "resume/attempt": self._attempt, **values})

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        texts = [[v if isinstance(v, str) else json.dumps(v, default=str) for v in r] for r in rows]
        head: list[str | int] = [*columns]
        self.row(step, {name: self._wandb.Table(columns=head, data=texts)})

    def artifact(self, name: str, kind: str, files: Mapping[str, Path], copied: bool) -> None:
        artifact = self._wandb.Artifact(name, type=kind)
        for path, file in files.items():
            if copied and file.stat().st_size <= REPORT_BYTES:
                artifact.add_file(str(file), name=path, policy="immutable", skip_cache=True)
            else:
                artifact.add_reference(file.as_uri(), name=path, checksum=False)
        self._run.log_artifact(artifact)

    def alert(self, title: str, text: str, level: Level) -> None:
        self._run.alert(title, text, level)

    def close(self, outcome: str, exit_code: int) -> None:
        if outcome == "preempted":
            self._run.mark_preempting()
        try:
            self._run.finish(exit_code=exit_code)
        except TimeoutError:
            self._say(f"W&B: not everything is uploaded; to upload the rest: {self._sync}")


class _TensorBoard:
    """Event files of one attempt; tables, artifacts and alerts have no place in them."""

    def __init__(self, run: Run, config: dict[str, Any]) -> None:
        name = f"attempt-{run.attempt:04d}"
        self._tracker = TensorBoardTracker(name, run.path / "tensorboard")
        self._tracker.start()
        values = {name: "none" if value is None else value for name, value in config.items()}
        self._tracker.store_init_configuration(values)

    def row(self, step: int, values: Mapping[str, float]) -> None:
        self._tracker.log(dict(values), step=step)

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None: ...
    def artifact(self, name: str, kind: str, files: Mapping[str, Path], copied: bool) -> None: ...
    def alert(self, title: str, text: str, level: Level) -> None: ...

    def close(self, outcome: str, exit_code: int) -> None:
        self._tracker.finish()


def _folder(run: Run) -> Path:
    return Path(os.environ.get("WANDB_DIR", run.path))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:200]}"
