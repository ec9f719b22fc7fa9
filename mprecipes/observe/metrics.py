# SPDX-License-Identifier: Apache-2.0
"""Names and units of everything that is logged, the local metrics file, and tokens per second.

`metrics.jsonl`: one JSON object a line, appended, with `attempt`, `step` (the optimizer step) and
the values under their names. A value that is not finite is written as the text "nan", "inf" or
"-inf", because JSON has no such number and a gap in a curve would hide it. A line torn by a kill
stays torn, the next one begins on a line of its own, and the reader counts it. Not fsynced: the
journal is the record of the training, this file feeds curves.
"""

import difflib
import json
import logging
import math
import numbers
from collections import deque
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from mprecipes.errors import ConfigError
from mprecipes.faults import fault_point

_logger = logging.getLogger(__name__)


class Metric(NamedTuple):
    """What a logged number is: its unit ("" for a pure number) and its meaning in one clause."""

    unit: str
    meaning: str


GROUPS = ("train", "eval", "precision", "perf", "checkpoint", "resume")

METRICS: dict[str, Metric] = {
    "train/loss": Metric("nats per token", "mean over the valid targets of the global batch"),
    "train/grad_norm": Metric("", "L2 norm of the whole gradient before clipping"),
    "train/learning_rate": Metric("", "the one this update was made with"),
    "train/updates": Metric("updates", "optimizer steps that changed the weights"),
    "train/samples_seen": Metric("sequences", "position in the run's order, over all attempts"),
    "train/tokens_seen": Metric("tokens", "valid targets trained on, over all attempts"),
    "train/epoch": Metric("epochs", "samples_seen divided by the rows of the training data"),
    "train/alerts": Metric("alerts", "raised by this process; each is a line of its own too"),
    "eval/loss": Metric("nats per token", "mean over all valid targets of the held-out rows"),
    "eval/perplexity": Metric("", "exp of eval/loss"),
    "eval/token_accuracy": Metric("", "share of held-out targets that are the likeliest token"),
    "eval/tokens": Metric("tokens", "valid targets of the held-out rows"),
    "eval/seconds": Metric("seconds", "duration of the evaluation"),
    "precision/loss_scale": Metric("", "FP16: of the next step"),
    "precision/skipped_steps": Metric("steps", "left out since numbers overflowed, all attempts"),
    "precision/gradient_underflow_fp16": Metric("", "share of scaled gradients below 2^-24"),
    "precision/gradient_underflow_fp8": Metric("", "share of gradients FP8 would make zero"),
    "precision/vanishing_updates_bf16": Metric("", "share below half an ulp of a BF16 weight"),
    "precision/vanishing_updates_fp16": Metric("", "share below half an ulp of an FP16 weight"),
    "precision/vanishing_updates_masters": Metric("", "share that the FP32 masters lost"),
    "precision/nonfinite_gradients": Metric("parameters", "whose gradient was not finite"),
    "precision/layer_grad_norm/*": Metric("", "L2 norm of a layer's gradient before clipping"),
    "precision/fp8_amax/*": Metric("", "largest input of an FP8 module"),
    "precision/activation_amax/*": Metric("", "largest output of a block"),
    "precision/subnormal_activations/*": Metric("", "share FP16 holds with fewer bits"),
    "precision/underflow_activations/*": Metric("", "share FP16 rounds to zero"),
    "precision/probe_loss/*": Metric("nats per token", "of `mprecipes probe`, in a mode"),
    "perf/tokens_per_second": Metric("tokens/s", "all ranks, over a window of this process"),
    "perf/step_seconds": Metric("seconds", "mean of the same window, pauses left out"),
    "perf/communicated_bytes": Metric("bytes", "one rank sends in a step; measured in the third"),
    "perf/device_memory_bytes": Metric("bytes", "peak allocated on the main rank's device"),
    "perf/host_memory_bytes": Metric("bytes", "peak resident on the main rank's host"),
    "checkpoint/save_seconds": Metric("seconds", "from the snapshot to the published folder"),
    "checkpoint/stall_seconds": Metric("seconds", "training stood still for this save"),
    "checkpoint/wait_seconds": Metric("seconds", "of these, until the save before was published"),
    "checkpoint/failed_saves": Metric("saves", "that were not published, in this process"),
    "checkpoint/bytes": Metric("bytes", "size of the published checkpoint"),
    "checkpoint/step": Metric("steps", "step of the newest published checkpoint"),
    "checkpoint/deleted": Metric("checkpoints", "given up by retention, in this process"),
    "checkpoint/quarantined": Metric("checkpoints", "set aside, in this process"),
    "checkpoint/milestones": Metric("checkpoints", "copied to milestones/, in this process"),
    "checkpoint/mirrored": Metric("checkpoints", "copied to the mirror, in this process"),
    "checkpoint/mirror_deleted": Metric("checkpoints", "given up at the mirror, in this process"),
    "checkpoint/mirror_errors": Metric("errors", "of copying to the mirror; each is tried again"),
    "checkpoint/mirror_skipped": Metric("checkpoints", "gone before the mirror had them"),
    "checkpoint/milestone_errors": Metric("errors", "of copying milestones; each is tried again"),
    "checkpoint/aftercare_errors": Metric("errors", "of what follows a save, each tried again"),
    "checkpoint/cleanup_errors": Metric("errors", "of deleting; tried at the next start"),
    "checkpoint/scrubs": Metric("passes", "over everything kept, in the background"),
    "checkpoint/scrub_problems": Metric("problems", "that these found; see reports/scrub.json"),
    "resume/restore_seconds": Metric("seconds", "from finding checkpoints to restored state"),
    "resume/replayed_steps": Metric("steps", "steps compared with the journal of the first pass"),
    "resume/loss_difference": Metric("", "largest relative difference of a replayed loss"),
    "resume/released": Metric("", "1 when probation ended well, 0 when it halted the run"),
}


class MetricsLog:
    """The local sink: appends checked values to `metrics.jsonl`, and never stops a training.

    Main process only in effect; construct it on every rank with `enabled` false on the others, so
    that an unknown name is the same error everywhere.

    Attributes:
        lost: lines that could not be written (disk full, file system gone); warned about once.
    """

    def __init__(self, path: Path, *, enabled: bool = True, attempt: int = 0) -> None:
        self.path, self.attempt, self.lost = path, attempt, 0
        self._names = dict(METRICS)
        self._enabled = enabled
        self._torn = False
        self._file: FileIO | None = None

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def declare(self, name: str, unit: str, meaning: str) -> None:
        """Adds a recipe's own metric; repeating a declaration word for word changes nothing.

        Raises:
            ConfigError: the name is not `group/name`, or already means something else.
        """
        group, _, rest = name.partition("/")
        if not rest or group not in GROUPS:
            raise ConfigError(
                f"metric name {name!r}",
                expected=f"group/name with a group of {', '.join(GROUPS)}",
                where="MetricsLog.declare",
                action=f"rename it, for example to train/{rest or group}",
            )
        known = self._names.setdefault(name, Metric(unit, meaning))
        if known != (unit, meaning):
            raise ConfigError(
                f"metric {name!r} as {meaning!r} in {unit!r}",
                expected=f"its present meaning {known.meaning!r} in {known.unit!r}",
                where="MetricsLog.declare",
                action="choose another name: a curve may not change its meaning",
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one line; blocks for one small write.

        Args:
            step: optimizer step the values belong to.
            values: finite or not, plain numbers only (a tensor would be a hidden device wait).

        Raises:
            ConfigError: a name nobody declared, or a value that is not a plain number.
        """
        line: dict[str, Any] = {"attempt": self.attempt, "step": step}
        for name, value in values.items():
            line[name] = self._checked(name, value)
        if self._enabled:
            self._write(step, json.dumps(line, allow_nan=False).encode("ascii") + b"\n")

    def close(self) -> None:
        """Closes the file; says how many lines were lost, if any were."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            self._warn_lost(error)
        if self.lost:
            _logger.warning("%s: %d lines were lost in all", self.path, self.lost)

    def _checked(self, name: str, value: float) -> float | str:
        family = "/".join([*name.split("/")[:2], "*"])  # one curve a layer
        if name not in self._names and family not in self._names:
            nearest = difflib.get_close_matches(name, self._names, n=1, cutoff=0.0)
            raise ConfigError(
                f"unknown metric {name!r}",
                expected=f"a name of the table; the nearest is {nearest[0]!r}",
                where="MetricsLog.log",
                action="correct the name, or declare(name, unit, meaning) it before the loop",
            )
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ConfigError(
                f"{name} = {value!r} ({type(value).__name__})",
                expected="a plain int or float",
                where="MetricsLog.log",
                action="pass a number; of a tensor, the .item() where the loop waits anyway",
            )
        if isinstance(value, numbers.Integral):
            return int(value)
        number = float(value)
        return number if math.isfinite(number) else str(number)

    def _write(self, step: int, line: bytes) -> None:
        try:
            fault_point("metrics.before_write", step)
            if self._file is None:
                self._file = FileIO(self.path, "a+")
                self._torn = _ends_torn(self._file)
            data = b"\n" + line if self._torn else line
            # Unbuffered: after a failed write nothing is left over that would be written later.
            self._torn = True
            if self._file.write(data) != len(data):
                raise OSError(f"only a part of {len(data)} bytes was written")
            self._torn = False
        except OSError as error:
            self._warn_lost(error)

    def _warn_lost(self, error: OSError) -> None:
        self.lost += 1
        if self.lost == 1:
            _logger.warning(
                "%s: metrics are being lost (%s); the training goes on, and its journal is "
                "another file. Free space or check the file system.",
                self.path,
                error,
            )


def _ends_torn(file: FileIO) -> bool:
    """True when the file's last line was cut off by a kill; the next line must not continue it."""
    if file.seek(0, 2) == 0:
        return False
    file.seek(-1, 2)
    return file.read(1) != b"\n"


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Gives the lines of a `metrics.jsonl`, oldest first, and the number of torn ones left out.

    Values written as "nan", "inf" and "-inf" come back as floats. A file that is absent is empty.
    """
    lines: list[dict[str, Any]] = []
    torn = 0
    for text in path.read_bytes().splitlines() if path.exists() else []:
        if not text:  # where a line failed without a single byte
            continue
        try:
            line = json.loads(text)
            read = {k: float(v) if isinstance(v, str) else v for k, v in line.items()}
        except (ValueError, AttributeError):  # no JSON, no number, no object
            torn += 1
            continue
        lines.append(read)
    return lines, torn


class ThroughputMeter:
    """Tokens per second and seconds per step over the newest steps of *this* process.

    Made from the durations that the journal records. The first step is left out: it holds
    compilation, allocation and the filling of caches. Totals over a run's attempts are kept
    elsewhere (`train/tokens_seen`) and never divided by a time of this process.

    Args:
        window: steps that count, at most.
    """

    def __init__(self, window: int = 20) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=window)
        self._warm = False

    def update(self, tokens: int, seconds: float) -> None:
        """Notes an optimizer step.

        Args:
            tokens: valid targets of the global batch, over all ranks.
            seconds: duration of the step, pauses left out.
        """
        if self._warm:
            self._steps.append((seconds, tokens))
        self._warm = True

    @property
    def tokens_per_second(self) -> float | None:
        """None until two steps have ended in this process."""
        seconds = self._seconds()
        return sum(tokens for _, tokens in self._steps) / seconds if seconds > 0 else None

    @property
    def step_seconds(self) -> float | None:
        """None until two steps have ended in this process."""
        seconds = self._seconds()
        return seconds / len(self._steps) if seconds > 0 else None

    def _seconds(self) -> float:
        return sum(seconds for seconds, _ in self._steps)
