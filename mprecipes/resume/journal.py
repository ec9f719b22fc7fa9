# SPDX-License-Identifier: Apache-2.0
"""The record of what was really trained on: one JSON line per optimizer step, one file per attempt.

On disk: `journal/attempt-0001.jsonl`. Floats are the shortest text that reads back to the same
float; what is not finite is the text "nan", "inf" or "-inf", so that every line is strict JSON. A
line is one `write`, so it survives the death of the process; it is not fsynced, so a lost machine
may lose the last lines. A last line that was torn is dropped and counted; one elsewhere is refused.

A rollback is a line {"rollback": {...}}: the steps after its `to_step` are void, and those that
follow are numbered from there again. A later line of a step is the valid one.
"""

import json
import math
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mprecipes.compute.numerics import StepFacts
from mprecipes.data.order import Position
from mprecipes.errors import CheckpointError, VerificationError


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as all ranks saw it.

    Attributes:
        step: optimizer steps attempted, this one included.
        updates: optimizer steps applied so far.
        samples_seen: position in the run's order after this step.
        tokens: targets of this step's global batch.
        batch_digest: 16 hex digits over the sequences handed to the model.
        loss_scale: of the next step, None without a loss scaler.
        skipped: the update was not applied.
    """

    attempt: int
    step: int
    updates: int
    samples_seen: int
    tokens: int
    batch_digest: str
    loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float | None
    skipped: bool
    step_seconds: float


@dataclass(frozen=True)
class Rollback:
    """A return to an earlier checkpoint, without the samples that led away from it.

    Attributes:
        step: that was being made when the run turned back.
        to_step: of the checkpoint it went back to.
        first, end: the samples left out from there on, of the whole order; `end` is the first one
            after.
        loss, grad_norm: of that step, which was not applied.
        reason: in one clause.
    """

    attempt: int
    step: int
    to_step: int
    first: int
    end: int
    loss: float
    grad_norm: float
    reason: str


_TYPES: dict[str, Any] = {field.name: field.type for field in fields(StepRecord)}


class Journal:
    """Appends this attempt's steps, where this rank writes. A context manager.

    Args:
        folder: `journal/` of the run, made if absent.
        attempt: number of this attempt, from 0.
        writes_here: False makes `append` do nothing.

    Raises:
        VerificationError: this attempt already has a journal.
    """

    def __init__(self, folder: Path, attempt: int, writes_here: bool) -> None:
        self._path, self.attempt = folder / f"attempt-{attempt:04d}.jsonl", attempt
        self._descriptor: int | None = None
        if not writes_here:
            return
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            raise VerificationError(
                f"attempt {attempt} already has a journal",
                expected="no file of that name: this attempt is only starting",
                where=str(self._path),
                action="see with `mprecipes status` whether another launch writes to this folder; "
                "if none does, run.json is older than the journal: move this file away",
            ) from None

    def append(self, record: StepRecord) -> None:
        """Writes one line, whole or not at all unless the disk fails; does not fsync.

        Raises:
            CheckpointError: the line could not be written.
        """
        self._append(encode(record), record.step)

    def roll_back(self, rollback: Rollback) -> None:
        """Notes that the steps after `to_step` are void; blocks for the fsync.

        Raises:
            CheckpointError: the line could not be written.
        """
        self._append(_line({"rollback": asdict(rollback)}), rollback.step)
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def _append(self, line: bytes, step: int) -> None:
        if self._descriptor is None:
            return
        try:
            written = os.write(self._descriptor, line)
            failure = f"{written} of {len(line)} bytes written" if written < len(line) else None
        except OSError as error:
            failure = str(error)
        if failure:
            raise CheckpointError(
                f"the journal line of step {step} could not be written: {failure}",
                expected="a line on disk for every step trained",
                where=str(self._path),
                action="free space or repair the disk, then launch the same command again",
            )

    def write(
        self,
        position: Position,
        seen: StepFacts,
        *,
        tokens: int,
        learning_rate: float,
        step_seconds: float,
    ) -> StepRecord:
        """Appends the step that ended at `position`, on every rank gives its record.

        Args:
            seen: the step as all ranks saw it.
            tokens: valid targets of the global batch.
            learning_rate: the update was made with.

        Raises:
            CheckpointError: the line could not be written.
        """
        record = StepRecord(
            attempt=self.attempt,
            step=position.step,
            updates=position.updates,
            samples_seen=position.samples_seen,
            tokens=tokens,
            batch_digest=seen.batch_digest,
            loss=seen.loss,
            grad_norm=seen.grad_norm,
            learning_rate=learning_rate,
            loss_scale=seen.loss_scale,
            skipped=seen.skipped,
            step_seconds=step_seconds,
        )
        self.append(record)
        return record

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@dataclass(frozen=True)
class JournalHistory:
    """The journals of all attempts of a run.

    Attributes:
        records: each attempt's steps in the order they were trained, without those that a later
            rollback, of this attempt or another, made void.
        torn: number of last lines that were dropped because the process died while writing them.
        rollbacks: in the order they came.
    """

    records: dict[int, list[StepRecord]]
    torn: int
    rollbacks: tuple[Rollback, ...] = ()

    def first_pass(
        self, before_attempt: int, without: Collection[int] = ()
    ) -> dict[int, StepRecord]:
        """Gives each step's record of the latest attempt before `before_attempt` that has it.

        A step that was rolled back and not made again has none.

        Args:
            without: attempts that are not taken into account.
        """
        latest: dict[int, StepRecord] = {}
        for attempt in sorted(self.records.keys() - set(without)):
            if attempt < before_attempt:
                latest.update((record.step, record) for record in self.records[attempt])
        return dict(sorted(latest.items()))


def encode(record: StepRecord) -> bytes:
    """Gives the line of a record, its newline included."""
    return _line(asdict(record))


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(_strict(values), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    is_number = isinstance(value, float) and not math.isfinite(value)
    return repr(float(value)) if is_number else value


def decode(line: bytes) -> StepRecord | Rollback:
    """Reads one line back to the very same floats; keys it does not know are left out.

    Raises:
        ValueError: the line is not a whole record; the text says why.
    """
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__} where an object belongs")
    if isinstance(values.get("rollback"), dict):
        return _rollback(values["rollback"])
    if missing := [name for name in _TYPES if name not in values]:
        raise ValueError(f"keys missing: {', '.join(missing)}")
    return StepRecord(**{name: _typed(name, values[name], _TYPES[name]) for name in _TYPES})


def _rollback(values: dict[str, Any]) -> Rollback:
    wanted = {field.name: field.type for field in fields(Rollback)}
    if missing := [name for name in wanted if name not in values]:
        raise ValueError(f"keys missing in a rollback: {', '.join(missing)}")
    return Rollback(**{name: _typed(name, values[name], wanted[name]) for name in wanted})


def _typed(name: str, value: Any, wanted: Any) -> Any:
    if wanted in (float, float | None) and value in ("nan", "inf", "-inf"):
        return float(value)
    if wanted in (float, float | None) and type(value) in (int, float):
        return float(value)
    if type(value) is wanted or (value is None and wanted == float | None):
        return value
    raise ValueError(f"{name} is {value!r}")


def read_journals(folder: Path) -> JournalHistory:
    """Reads every attempt's journal; a folder that is absent holds none.

    Raises:
        VerificationError: a line other than a file's last one is not a record, or the steps do not
            rise; file and line are named.
    """
    records: dict[int, list[StepRecord]] = {}
    rollbacks: list[Rollback] = []
    torn = 0
    for path in sorted(folder.glob("attempt-*.jsonl")):
        number = re.fullmatch(r"attempt-(\d{4,})\.jsonl", path.name)
        if number is None:
            continue
        attempt = int(number[1])
        records[attempt] = []
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
        for index, line in enumerate(lines if lines != [b""] else []):
            try:
                record = decode(line)
            except ValueError as error:
                if index == len(lines) - 1:
                    torn += 1
                    continue
                raise _refused(path, index, f"not a whole record ({error})") from None
            before = records[attempt][-1].step if records[attempt] else record.step - 1
            if isinstance(record, Rollback) and record.attempt == attempt:
                rollbacks.append(record)
                for each, made in records.items():
                    records[each] = [kept for kept in made if kept.step <= record.to_step]
                continue
            if record.attempt != attempt or record.step <= before or isinstance(record, Rollback):
                found = f"attempt {record.attempt}, step {record.step} after step {before}"
                raise _refused(path, index, found)
            records[attempt].append(record)
    return JournalHistory(records, torn, tuple(rollbacks))


def _refused(path: Path, index: int, found: str) -> VerificationError:
    return VerificationError(
        found,
        expected="one record of this attempt a line, steps rising; only the last may be torn",
        where=f"{path}:{index + 1}",
        action="the file changed after it was written: restore it from a copy, or move it out of "
        "the folder to go on without checking the steps it recorded",
    )
