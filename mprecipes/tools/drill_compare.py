# SPDX-License-Identifier: Apache-2.0
"""Compares a run that was killed and resumed with one that was never interrupted, exactly.

Numbers are compared as their bits (floats as hex text, tensors as bytes), so -0.0 differs from 0.0
and a NaN equals itself. For every step the newest record of the interrupted run counts, which is
the one that led to its final weights; what a resumed attempt replayed is compared with the pass
before it in a row of its own.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mprecipes.checkpoint import loading
from mprecipes.checkpoint import manifest as manifests
from mprecipes.errors import VerificationError
from mprecipes.resume.journal import StepRecord, read_journals
from mprecipes.tools.verify import newest_checkpoint, verify_path

JOURNAL_ROWS = (
    ("samples (batch digest)", "batch_digest"),
    ("position (samples_seen)", "samples_seen"),
    ("target tokens", "tokens"),
    ("learning rate", "learning_rate"),
    ("loss", "loss"),
    ("gradient norm", "grad_norm"),
    ("updates applied", "updates"),
    ("loss scale", "loss_scale"),
)
REPLAYED = tuple(field for _, field in JOURNAL_ROWS)


@dataclass(frozen=True)
class Row:
    """One compared thing.

    Attributes:
        what: its name in the table.
        compared: how many values were compared.
        unit: what was counted: steps, elements, digests, files.
        different: how many of them differ.
        first_difference: {"where", "expected", "found"} of the first that differs, or None.
        may_be_empty: True where nothing to compare is no failure.
    """

    what: str
    compared: int
    unit: str
    different: int = 0
    first_difference: dict[str, str] | None = None
    may_be_empty: bool = False

    @property
    def equal(self) -> bool:
        return self.different == 0 and (self.compared > 0 or self.may_be_empty)


def exact(value: Any) -> str:
    """Gives a text that is equal only for equal bits."""
    return value.hex() if isinstance(value, float) else str(value)


def compare_values(
    what: str, unit: str, pairs: Iterable[tuple[str, Any, Any]], *, may_be_empty: bool = False
) -> Row:
    """Compares (where, expected, found) triples; None stands for a value that is missing."""
    compared, different, first = 0, 0, None
    for where, expected, found in pairs:
        compared += 1
        if exact(expected) != exact(found):
            different += 1
            first = first or {"where": where, "expected": exact(expected), "found": exact(found)}
    return Row(what, compared, unit, different, first, may_be_empty)


def last_pass(history: dict[int, list[StepRecord]]) -> dict[int, StepRecord]:
    """Gives each step's record of the newest attempt that reached it, by step."""
    newest = {record.step: record for _, records in sorted(history.items()) for record in records}
    return dict(sorted(newest.items()))


def compare_journals(
    reference: dict[int, list[StepRecord]], interrupted: dict[int, list[StepRecord]]
) -> list[Row]:
    """Gives the rows of what every step was trained on and came to."""
    left, right = last_pass(reference), last_pass(interrupted)
    steps = sorted({*left, *right})
    rows = []
    for what, field in JOURNAL_ROWS:
        if field == "loss_scale" and all(record.loss_scale is None for record in left.values()):
            continue
        pairs = (
            (f"step {step}", _of(left, step, field), _of(right, step, field)) for step in steps
        )
        rows.append(compare_values(what, "steps", pairs))
    rows.append(compare_values("replayed steps", "steps", _replays(interrupted), may_be_empty=True))
    return rows


def _of(records: dict[int, StepRecord], step: int, field: str) -> Any:
    return getattr(records[step], field) if step in records else "no record"


def _replays(history: dict[int, list[StepRecord]]) -> Iterable[tuple[str, str, str]]:
    before: dict[int, StepRecord] = {}
    for attempt, records in sorted(history.items()):
        for record in records:
            if record.step in before:
                sides = (before[record.step], record)
                texts = [[exact(getattr(side, name)) for name in REPLAYED] for side in sides]
                unequal = [i for i, pair in enumerate(zip(*texts, strict=True)) if len({*pair}) > 1]
                index = unequal[0] if unequal else 0
                where = f"step {record.step}, attempt {attempt}, {REPLAYED[index]}"
                yield where, texts[0][index], texts[1][index]
        before.update({record.step: record for record in records})


def compare_tensors(
    what: str, reference: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> Row:
    """Compares tensors by name, dtype, shape and bytes; counts elements."""
    compared, different, first = 0, 0, None
    for name in sorted({*reference, *found}):
        left, right = reference.get(name), found.get(name)
        compared += max(0 if side is None else side.numel() for side in (left, right))
        if left is None or right is None or (left.dtype, left.shape) != (right.dtype, right.shape):
            different += max(1, *(0 if side is None else side.numel() for side in (left, right)))
            difference = {"where": name, "expected": _kind(left), "found": _kind(right)}
            first = first or difference
            continue
        sides = [side.contiguous().reshape(-1) for side in (left, right)]
        size = sides[0].element_size()
        unequal = (
            (sides[0].view(torch.uint8) != sides[1].view(torch.uint8)).view(-1, size).any(dim=1)
        )
        if count := int(unequal.sum()):
            different += count
            index = int(unequal.nonzero()[0])
            values = [exact(side[index].item()) for side in sides]
            where = f"{name}[{index}]"
            first = first or {"where": where, "expected": values[0], "found": values[1]}
    return Row(what, compared, "elements", different, first)


def _kind(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def compare_checkpoints(reference: Path, interrupted: Path) -> list[Row]:
    """Gives the rows of where both newest checkpoints stand and of every value they hold."""
    left, right = manifests.read_manifest(reference), manifests.read_manifest(interrupted)
    counters = ("step", "updates", "samples_seen", "tokens_seen")
    pairs = ((name, getattr(left, name), getattr(right, name)) for name in counters)
    rows = [compare_values("final position", "counters", pairs)]
    tensors = [
        loading.get(folder, manifest.files)
        for folder, manifest in ((reference, left), (interrupted, right))
    ]
    groups = {"weights/": "parameters", "optimizer/": "optimizer state"}
    for prefix, what in groups.items():
        sides = [{k: v for k, v in side.items() if k.startswith(prefix)} for side in tensors]
        rows.append(compare_tensors(what, sides[0], sides[1]))
    rest = [{k: v for k, v in side.items() if not k.startswith(tuple(groups))} for side in tensors]
    if any(rest):
        rows.append(compare_tensors("other state", rest[0], rest[1]))
    digests = (left.state_digests, right.state_digests)
    names = sorted({*digests[0], *digests[1]})
    pairs = ((name, digests[0].get(name), digests[1].get(name)) for name in names)
    rows.append(compare_values("state digests", "digests", pairs))
    return rows


def verify_row(what: str, run: Path) -> Row:
    """Gives the row that says whether every checkpoint of a run verifies; counts files."""
    verdicts = verify_path(run)
    problems = [(verdict, problem) for verdict in verdicts for problem in verdict.problems]
    first = None
    if problems:
        verdict, problem = problems[0]
        where = f"{verdict.path.name}/{problem.path}"
        first = {"where": where, "expected": problem.expected, "found": problem.found}
    return Row(what, sum(v.num_files for v in verdicts), "files", len(problems), first)


def resume_verdict(run: Path) -> Row:
    """Gives the row that says what the run itself concluded about its last resume.

    Released with warnings is released: a drill is about what was computed, not about how fast.
    """
    reports = sorted((run / "resume").glob("attempt-*.json"))[-1:]
    verdicts = [
        (path.name, "released", json.loads(path.read_bytes())["verdict"].partition("_with_")[0])
        for path in reports
    ]
    return compare_values("resume report", "verdict", verdicts, may_be_empty=True)


def compare_runs(reference: Path, interrupted: Path) -> list[Row]:
    """Gives every row of the drill's table, in its order.

    Args:
        reference: run folder of the run that was never interrupted.
        interrupted: run folder of the run that was killed and resumed until it finished.
    """
    rows = compare_journals(
        read_journals(reference / "journal").records, read_journals(interrupted / "journal").records
    )
    ends = [newest_checkpoint(run) for run in (reference, interrupted)]
    if ends[0] is None or ends[1] is None:
        pairs = [("newest", "a checkpoint in both", " and ".join(str(end) for end in ends))]
        rows.append(compare_values("final checkpoints", "runs", pairs))
    else:
        try:
            rows += compare_checkpoints(ends[0], ends[1])
        except VerificationError as error:
            pairs = [(error.where, error.expected, error.found)]
            rows.append(compare_values("final checkpoints", "runs", pairs))
    rows.append(resume_verdict(interrupted))
    rows.append(verify_row("verify, uninterrupted run", reference))
    rows.append(verify_row("verify, resumed run", interrupted))
    return rows
