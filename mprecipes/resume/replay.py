# SPDX-License-Identifier: Apache-2.0
"""What a replayed step must repeat of its first pass, how exactly, and what a difference means.

Positions, digests, learning rate and loss scale must be equal. Loss and gradient norm must be equal
bit for bit where every attempt since the first pass computed as this one does (same topology,
environment, batch and precision), and within a relative tolerance elsewhere. What a change accepted
since then makes different by right is not compared. Once a step was allowed to differ, so are the
steps after it: they start from another state.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mprecipes.resume.contract import compare
from mprecipes.resume.journal import StepRecord

MEANINGS = {  # key -> (what a difference usually means, what to try), causes before consequences
    "samples_seen": (
        "the run continues from another position in its data",
        "compare `mprecipes inspect` of the checkpoint with the journal: the global batch changed, "
        "or how the position advances",
    ),
    "batch_digest": (
        "the model was fed other tokens: the data, the tokenizer or the order changed",
        "look for a source file that changed in place, or code that shuffles outside SampleOrder",
    ),
    "tokens": (
        "another number of targets entered the loss: labels, masking or padding changed",
        "look for a change in how labels are made",
    ),
    "updates": (
        "another number of updates was applied: a step was skipped in one pass only",
        "look at `skipped` and `loss_scale` of both passes in the journal",
    ),
    "learning_rate": (
        "the schedule is not a function of `updates` alone, or its settings changed",
        "compute the learning rate from `position.updates` and the config, nothing else",
    ),
    "loss_scale": (
        "the loss scaler was not restored, or gradients overflowed at other steps",
        "pass the scaler to CheckpointManager",
    ),
    "loss": (
        "same data, another loss: weights were not restored, or dropout or arithmetic changed",
        "call seed_micro_batch before each forward; look for nondeterministic kernels and for "
        "state the recipe keeps outside model and optimizer",
    ),
    "grad_norm": (
        "same loss, another gradient: a nondeterministic backward, or accumulation changed",
        "set torch.use_deterministic_algorithms(True) to find the kernel",
    ),
}
NUMERIC = frozenset({"loss", "grad_norm"})
_SCALED = frozenset({"updates", "learning_rate", "loss_scale"})
_OTHER_DATA = frozenset({"tokens", "batch_digest"}) | NUMERIC
_FREED: dict[str, frozenset[str]] = {  # flag -> keys that differ by right
    "changed_data": _OTHER_DATA,
    "changed_seed": _OTHER_DATA,
    "changed_global_batch": _OTHER_DATA | {"samples_seen"},
    "changed_recipe_version": _OTHER_DATA | _SCALED,
    "changed_fallback": NUMERIC | {"learning_rate"},
    # the same function of the same data, computed otherwise: compared, and a difference only warns
    "changed_micro_batch": frozenset(),
    "changed_precision": frozenset(),
    "changed_engine": frozenset(),
    "changed_torch_compile": frozenset(),
    "changed_environment": frozenset(),
    # optimizer settings that no learning rate depends on
    **{
        f"changed_{option}": NUMERIC
        for option in (
            "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "dropout"
        )
    },
}  # fmt: skip
_ANY_OPTION = NUMERIC | {"learning_rate"}
WARNED = {flag for flag, keys in _FREED.items() if not keys}
NOT_NUMERIC = {"environment.git_commit", "environment.git_dirty"}


@dataclass(frozen=True)
class Relation:
    """How this attempt stands to an earlier one and to all attempts between them.

    Attributes:
        reasons: facts that keep loss and gradient norm from being bit-equal; empty asks for bits.
        flags: contract changes that came in since.
    """

    reasons: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()

    def __or__(self, other: "Relation") -> "Relation":
        return Relation(self.reasons | other.reasons, self.flags | other.flags)

    @property
    def freed(self) -> frozenset[str]:
        """Keys that are not compared."""
        return frozenset().union(*(_FREED.get(flag, _ANY_OPTION) for flag in self.flags))


def relate(
    facts: Mapping[int, Mapping[str, Any]], current: Mapping[str, Any], classes: Mapping[str, str]
) -> dict[int, Relation]:
    """Gives the relation to each earlier attempt that trained.

    Args:
        facts: by attempt, what it was compared by.
    """
    relations, since = {}, Relation()
    for attempt in sorted(facts, reverse=True):
        since |= relation_between(facts[attempt], current, classes)
        relations[attempt] = since
    return relations


def relation_between(
    stored: Mapping[str, Any], current: Mapping[str, Any], classes: Mapping[str, str]
) -> Relation:
    """Gives how a launch stands to the one that `stored` tells of, a manifest or its like."""
    differences = compare(stored, current, classes)
    numeric = {
        difference.field
        for difference in differences
        if difference.kind != "free"
        or difference.field == "torch_compile"
        or difference.field.startswith(("topology.", "environment."))
    }
    flags = {difference.flag for difference in differences if difference.flag}
    return Relation(frozenset(numeric - NOT_NUMERIC), frozenset(flags))


@dataclass(frozen=True)
class Mismatch:
    """One key of one replayed step that is not what it was; `policy` is `halt` or `warn`."""

    step: int
    attempt: int
    key: str
    expected: Any
    found: Any
    policy: str

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.key} is {_exact(self.found)}, "
            f"was {_exact(self.expected)} in attempt {self.attempt}"
        )


class Replay:
    """Compares the steps of this attempt with their first pass.

    Args:
        first_pass: records of earlier attempts, by step; only steps this attempt will train.
        relations: by attempt, from `relate`.
        tolerance: relative difference allowed where bits are not asked for.
    """

    def __init__(
        self,
        first_pass: Mapping[int, StepRecord],
        relations: Mapping[int, Relation],
        tolerance: float,
    ) -> None:
        self._first_pass, self._relations, self._tolerance = first_pass, relations, tolerance
        self.relation = Relation()
        self.last_step = max(first_pass, default=0)
        self.num_due, self.num_compared = len(first_pass), 0

    def compare(self, record: StepRecord) -> list[Mismatch]:
        """Gives what differs in one step, causes first; [] also where no first pass is known."""
        before = self._first_pass.get(record.step)
        if before is None:
            return []
        self.num_compared += 1
        self.relation |= self._relations[before.attempt]
        freed, flags = self.relation.freed, self.relation.flags
        if flags and not record.loss_scale == before.loss_scale is None:
            freed |= _SCALED  # overflows, and so the updates, follow from the numbers
        tolerance = self._tolerance if self.relation.reasons else 0.0
        return [
            Mismatch(record.step, before.attempt, key, expected, found, _policy(key, flags))
            for key in MEANINGS
            if key not in freed
            for expected, found in [(getattr(before, key), getattr(record, key))]
            if not _agree(expected, found, tolerance if key in NUMERIC else 0.0)
        ]

    def forget_after(self, step: int) -> None:
        """Expects nothing of later steps: they were rolled back and are made of other samples."""
        self._first_pass = {n: record for n, record in self._first_pass.items() if n <= step}
        self.last_step = max(self._first_pass, default=0)

    @property
    def tolerance(self) -> str:
        """What was asked for so far, and why."""
        freed, reasons = self.relation.freed, ", ".join(sorted(self.relation.reasons))
        if freed >= NUMERIC:
            text = "exact"
        elif reasons:
            text = f"{self._tolerance} relative for loss and grad_norm ({reasons}); the rest exact"
        else:
            text = "bitwise: computed as in the first pass"
        if freed:
            flags = ", ".join(sorted(self.relation.flags))
            text += f"; {', '.join(sorted(freed))} not compared ({flags})"
        return text


def causes(mismatches: Iterable[Mismatch]) -> list[Mismatch]:
    """Gives each key's first mismatch, causes first."""
    first: dict[str, Mismatch] = {}
    for mismatch in mismatches:
        first.setdefault(mismatch.key, mismatch)
    return [first[key] for key in MEANINGS if key in first]


def _policy(key: str, flags: frozenset[str]) -> str:
    return "warn" if key in NUMERIC and flags & WARNED else "halt"


def _agree(expected: Any, found: Any, tolerance: float) -> bool:
    if isinstance(expected, float) and isinstance(found, float):
        if expected.hex() == found.hex():
            return True
        return bool(tolerance) and math.isclose(expected, found, rel_tol=tolerance)
    return bool(expected == found)


def _exact(value: Any) -> str:
    return f"{value!r} ({value.hex()})" if isinstance(value, float) else repr(value)
