# SPDX-License-Identifier: Apache-2.0
"""What a run folder says of its training, read once: the source of every comparison and report.

Of a step that was trained more than once the newest pass counts, which led to the final weights.
Nothing is written, and of checkpoints only the model's size is read.
"""

import contextlib
import itertools
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from mprecipes.errors import ConfigError
from mprecipes.identity.history import read_run
from mprecipes.observe.metrics import read_metrics
from mprecipes.resume.journal import StepRecord, read_journals
from mprecipes.tools.utilization import ModelSize, read_size, utilization

WARM_UP_STEPS = 5  # of each attempt: allocation, caches and compilation are no throughput
WINDOW_STEPS = 5
TAIL_SHARE = 0.1  # of the steps, where training loss must stand in for a held-out one


@dataclass(frozen=True)
class RunRecord:
    """One run as its folder tells it.

    Attributes:
        arm: what it is grouped by in a comparison; its precision mode unless a plan says more.
        outcome: of its last attempt, "running" while it goes on.
        steps: its optimizer steps, the newest pass of each.
        heldout: held-out loss by step, step 0 included where it was evaluated.
        stalls: seconds that training stood still for the save of a step.
        facts: `recipe`, `precision`, `topology`, `data`, `environment` and `config` of its last
            attempt that got as far as to know them.
        initial_weights: digest of the weights before the first step; None where none was recorded.
        memory: ("device" or "host", peak in bytes), or None.
        resumes: the resume reports, in short.
        wandb_id: of its run in W&B, whether or not it reported there.
    """

    path: Path
    arm: str
    mode: str
    outcome: str
    error: str | None
    horizon: int
    num_attempts: int
    steps: list[StepRecord]
    heldout: dict[int, float]
    stalls: dict[int, float]
    facts: dict[str, Any]
    initial_weights: str | None
    memory: tuple[str, int] | None
    resumes: list[dict[str, Any]] = field(default_factory=list)
    size: ModelSize | None = None
    wandb_id: str = ""

    @property
    def config(self) -> dict[str, Any]:
        return self.facts.get("config") or {}

    @property
    def seed(self) -> int | None:
        return self.config.get("seed")

    @property
    def label(self) -> str:
        return self.arm if self.seed is None else f"{self.arm}, seed {self.seed}"

    @property
    def is_complete(self) -> bool:
        """Whether it trained all the steps it was asked for."""
        return bool(self.steps) and self.steps[-1].step >= self.horizon

    @property
    def skipped(self) -> list[int]:
        return [record.step for record in self.steps if record.skipped]

    @cached_property
    def loss_kind(self) -> str:
        """What its final loss is of: "held-out", or "training" where nothing was held out."""
        trained = self.steps[-1].step if self.steps else 0
        return "held-out" if any(step > 0 for step in self.heldout) or not trained else "training"

    @cached_property
    def losses(self) -> dict[int, float]:
        """The curve that runs are judged by: held-out loss, or smoothed training loss."""
        if self.loss_kind == "held-out":
            return self.heldout
        return smooth({record.step: record.loss for record in self.steps}, len(self.steps))

    @property
    def final_loss(self) -> float | None:
        """At the last step, where it was evaluated there; None for a run that did not end."""
        if not self.is_complete or not self.losses:
            return None
        step = max(self.losses)
        return self.losses[step] if step == self.steps[-1].step else None

    @property
    def area(self) -> float | None:
        """Mean height of the loss curve between its first and last point (trapezoids), nats."""
        points = sorted(self.losses.items())
        if not self.is_complete or len(points) < 2:
            return None
        pairs = itertools.pairwise(points)
        whole = sum((b - a) * (left + right) / 2 for (a, left), (b, right) in pairs)
        return whole / (points[-1][0] - points[0][0])

    @cached_property
    def seconds(self) -> dict[int, float]:
        """Training time up to the end of each step: its saves included, evaluations left out."""
        total, found = 0.0, {0: 0.0}
        for record in self.steps:
            total += record.step_seconds + self.stalls.get(record.step, 0.0)
            found[record.step] = total
        return found

    @cached_property
    def _timed(self) -> list[StepRecord]:
        """Steps whose duration says something: the first ones of each attempt are left out."""
        by_attempt: dict[int, list[StepRecord]] = {}
        for record in self.steps:
            by_attempt.setdefault(record.attempt, []).append(record)
        timed = []
        for records in by_attempt.values():
            timed += records[min(WARM_UP_STEPS, len(records) // 2) :]
        return timed

    @property
    def tokens_per_second(self) -> float | None:
        """Median over windows of steps, saves left out."""
        steps = self._timed
        windows = [steps[i : i + WINDOW_STEPS] for i in range(0, len(steps), WINDOW_STEPS)]
        rates = [
            sum(record.tokens for record in window) / seconds
            for window in windows
            if (seconds := sum(record.step_seconds for record in window)) > 0
        ]
        return median(rates) if rates else None

    @property
    def tokens_per_second_with_saves(self) -> float | None:
        """All tokens over all time of the same steps, with what saves cost."""
        steps = self._timed
        seconds = sum(r.step_seconds + self.stalls.get(r.step, 0.0) for r in steps)
        return sum(record.tokens for record in steps) / seconds if seconds > 0 else None

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization, with what saves cost; None where the device is not known."""
        steps, rate = self._timed, self.tokens_per_second_with_saves
        tokens = sum(record.tokens for record in steps)
        return utilization(
            self.size, self.facts, mode=self.mode, tokens_per_second=rate,
            steps_per_second=rate * len(steps) / tokens if rate and tokens else None,
        )  # fmt: skip

    def seconds_to(self, loss: float) -> float | None:
        """Training seconds until the loss curve is at or below `loss`, interpolated; or None."""
        before: tuple[int, float] | None = None
        for step, value in sorted(self.losses.items()):
            if step in self.seconds and value <= loss:
                if before is None or before[1] == value:
                    return self.seconds[step]
                share = (before[1] - loss) / (before[1] - value)
                start = self.seconds[before[0]]
                return start + share * (self.seconds[step] - start)
            if step in self.seconds and math.isfinite(value):
                before = (step, value)
        return None


def smooth(values: dict[int, float], num_steps: int) -> dict[int, float]:
    """Gives the mean over each step and those before it, a tenth of the steps wide."""
    width = max(1, math.ceil(num_steps * TAIL_SHARE))
    items = sorted(values.items())
    return {
        step: sum(value for _, value in items[max(0, i + 1 - width) : i + 1]) / min(width, i + 1)
        for i, (step, _) in enumerate(items)
    }


def missing_record(
    path: Path, arm: str, mode: str, seed: int, horizon: int, outcome: str, error: str | None
) -> RunRecord:
    """Gives the record of a planned run that ended before it had a folder."""
    return RunRecord(
        path, arm, mode, outcome, error, horizon, num_attempts=1, steps=[], heldout={}, stalls={},
        facts={"config": {"seed": seed}}, initial_weights=None, memory=None,
    )  # fmt: skip


def read_record(
    path: Path, *, arm: str | None = None, mode: str | None = None, seed: int | None = None
) -> RunRecord:
    """Reads a run folder, also one that is going on or came to a bad end.

    Args:
        arm: what it is grouped by; None for its precision mode.
        mode, seed: what was planned, for a run that ended before it recorded them.

    Raises:
        ConfigError: no run folder, or a damaged one.
        VerificationError: a journal that was changed after it was written.
    """
    info = read_run(path)
    journals = read_journals(path / "journal").records
    newest = {record.step: record for _, steps in sorted(journals.items()) for record in steps}
    known = [attempt["contract"] for attempt in info.attempts if "contract" in attempt]
    facts: dict[str, Any] = known[-1] if known else {}
    begun = {a["initial_weights"] for a in info.attempts if a.get("initial_weights")}
    if len(begun) > 1:
        raise ConfigError(
            f"attempts that began with different weights: {', '.join(sorted(begun))}",
            expected="one seed, one recipe: the same weights before step 1 in every attempt",
            where=str(path / "run.json"),
            action="train into a new folder; this one mixes two trainings",
        )
    heldout, stalls, memory = _of_metrics(path / "metrics.jsonl")
    measured = str((facts.get("precision") or {}).get("mode", mode or "unknown"))
    facts = facts or {"config": {} if seed is None else {"seed": seed}}
    return RunRecord(
        path=path,
        arm=arm or measured,
        mode=measured,
        outcome=info.outcome or "running",
        error=None if info.is_running else info.attempts[-1].get("error"),
        horizon=info.attempts[-1].get("horizon") or info.horizon,
        num_attempts=len(info.attempts),
        steps=[newest[step] for step in sorted(newest)],
        heldout=dict(sorted(heldout.items())),
        stalls=stalls,
        facts=facts,
        initial_weights=begun.pop() if begun else None,
        memory=memory,
        resumes=_resumes(path / "resume"),
        size=read_size(path),
        wandb_id=info.wandb_id,
    )


def _of_metrics(
    path: Path,
) -> tuple[dict[int, float], dict[int, float], tuple[str, int] | None]:
    heldout: dict[int, float] = {}
    stalls: dict[int, float] = {}
    peaks: dict[str, float] = {}
    for line in read_metrics(path)[0]:
        step = int(line["step"])
        for name, value in ((name, _number(value)) for name, value in line.items()):
            if value is None:
                continue
            if name == "eval/loss":
                heldout[step] = value
            elif name == "checkpoint/stall_seconds":
                stalls[step] = value
            elif name in _PEAKS:
                peaks[_PEAKS[name]] = max(peaks.get(_PEAKS[name], 0.0), value)
    memory = next(((kind, int(peaks[kind])) for kind in _PEAKS.values() if peaks.get(kind)), None)
    return heldout, stalls, memory


_PEAKS = {"perf/device_memory_bytes": "device", "perf/host_memory_bytes": "host"}


def _number(value: Any) -> float | None:
    """Gives a metric's number, what is not finite included; None of anything else."""
    with contextlib.suppress(TypeError, ValueError):
        return float(value)
    return None


def _resumes(folder: Path) -> list[dict[str, Any]]:
    """Gives every resume report in short; of a damaged one, that it is."""
    names = ("attempt", "verdict", "checkpoint", "step", "replayed_steps")
    found = []
    for path in sorted(folder.glob("attempt-*.json")):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            short = {name: report.get(name) for name in names}
            short["checks"] = {c["name"]: c["verdict"] for c in report.get("checks", [])}
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            short = dict.fromkeys(names) | {"verdict": "unreadable", "checks": {}}
            short["checkpoint"] = path.name
        found.append(short)
    return found
