# SPDX-License-Identifier: Apache-2.0
"""The five checks of a resume: each owns facts, compares them, and says what a difference means."""

import math
from dataclasses import dataclass, field
from typing import Any

from mprecipes.resume.checks import Check
from mprecipes.resume.policy import CHECKS, ProbationPolicy

PROMISES = {
    "weights": "the weights in memory are those that were saved, on every rank",
    "optimizer": "moments, step counts and loss are those of the run that was interrupted",
    "data_order": "the run goes on with the sample, learning rate and random numbers that were due",
    "communication": "the processes reach each other and compute as before",
    "throughput": "training is as fast as before the interruption",
}
MEANINGS = {  # what a failure usually means, and what to try first
    "weights": (
        "a corrupted file or memory, or a rank that loaded another checkpoint",
        "run `mprecipes verify` on the checkpoint; if it verifies, look for code that changes the "
        "model while resuming, or for failing memory",
    ),
    "optimizer": (
        "optimizer state was lost, so the run would train anew, or dropout, precision or "
        "arithmetic changed",
        "look for code that builds the optimizer after the resume, and for what changed in the "
        "model's forward",
    ),
    "data_order": (
        "random streams, loader or schedule were not restored: another training set from here on",
        "look for a source file that changed in place, and for code that shuffles or draws numbers "
        "outside of SampleOrder",
    ),
    "communication": (
        "the environment changed: driver, topology, library, or the precision of reductions",
        "go back to the environment of the save, or look at the network between the ranks named",
    ),
    "throughput": (
        "a node is degraded: cooling, clock, a neighbour or the file system",
        "look at the ranks named; exclude their node, or raise throughput_tolerance",
    ),
}


@dataclass(frozen=True)
class Failure:
    """One fact that is not what it should be."""

    check: str
    fact: str
    expected: Any
    found: Any
    halts: bool

    def __str__(self) -> str:
        found, expected = _short(self.found), _short(self.expected)
        return f"{self.check}: {self.fact} is {found}, expected {expected}"


@dataclass
class Evidence:
    """The rows of the five checks; every rank notes the same and comes to the same verdicts.

    Attributes:
        failures: what did not agree, in the order it was noted.
    """

    policy: ProbationPolicy
    rows: dict[str, Check] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in CHECKS:
            self.rows[name] = Check(
                name, "pending", self.policy.of(name), {}, {}, {}, 0.0, PROMISES[name]
            )  # fmt: skip

    def note(
        self,
        check: str,
        fact: str,
        expected: Any,
        found: Any,
        *,
        agrees: bool | None = None,
        tolerance: str = "exact",
        seconds: float = 0.0,
        meaning: str | None = None,
        only_warns: bool = False,
    ) -> bool:
        """Adds a fact to a check and gives whether it agrees.

        Args:
            agrees: None compares for equality.
            tolerance: what may differ, and where that comes from.
            only_warns: whatever the policy of the check.
        """
        row = self.rows[check]
        row.seconds += seconds
        same = expected == found if agrees is None else agrees
        if any(failure.fact == fact for failure in self._of(check)):
            return same  # the first time it failed stays on the record
        row.expected[fact], row.found[fact], row.tolerance[fact] = expected, found, tolerance
        if not same:
            halts = self.policy.of(check) == "halt" and not only_warns
            if not self._of(check):
                row.meaning = f"usually: {meaning or MEANINGS[check][0]}"
            self.failures.append(Failure(check, fact, expected, found, halts))
            if halts or row.verdict != "failed":
                row.verdict = "failed" if halts else "warned"
        return same

    def tell(self, check: str, fact: str, found: Any, *, seconds: float = 0.0) -> None:
        """Adds what was measured and is compared with nothing."""
        self.rows[check].found[fact] = found
        self.rows[check].seconds += seconds

    @property
    def fatal(self) -> list[Failure]:
        """What must end the run."""
        return [failure for failure in self.failures if failure.halts]

    def settle(self) -> None:
        """Ends what is pending: passed, or `not_judged` where nothing could be compared."""
        for row in self.rows.values():
            if row.verdict == "pending":
                row.verdict = "passed" if row.expected else "not_judged"

    def _of(self, check: str) -> list[Failure]:
        return [failure for failure in self.failures if failure.check == check]


def within(expected: float, found: float, tolerance: float) -> bool:
    """Whether two floats are the same bits, or closer than a relative tolerance above zero."""
    if expected.hex() == found.hex():
        return True
    return tolerance > 0 and math.isclose(expected, found, rel_tol=tolerance)


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str | float) else str(value)
    if isinstance(value, float):
        text += f" ({value.hex()})"
    return text if len(text) <= 160 else text[:157] + "..."
