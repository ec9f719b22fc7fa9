# SPDX-License-Identifier: Apache-2.0
"""How long a resumed run is watched and what a failed check does: the option `probation`.

In a config file:

    probation: {observed_steps: 3, throughput: halt, throughput_tolerance: 0.1}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mprecipes.errors import ConfigError
from mprecipes.identity.section import read_section

Reaction = Literal["halt", "warn"]
CHECKS = ("weights", "optimizer", "data_order", "communication", "throughput")
FEWEST, MOST = 3, 5


class Options(Protocol):
    """What is used of a recipe's config."""

    @property
    def probation(self) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class ProbationPolicy:
    """How a resumed run is watched.

    Attributes:
        observed_steps: steps until it is released, 3 to 5.
        allow_unusual_observed_steps: allow another number, from 1 up.
        weights, optimizer, data_order, communication, throughput: what that check does when it
            fails: end the run with exit code 4, or say so and go on.
        throughput_tolerance: share of the stored tokens per second that may be missing.
        communication_seconds: limit of each collective of the communication check.
    """

    observed_steps: int = 5
    allow_unusual_observed_steps: bool = False
    weights: Reaction = "halt"
    optimizer: Reaction = "halt"
    data_order: Reaction = "halt"
    communication: Reaction = "halt"
    throughput: Reaction = "warn"
    throughput_tolerance: float = 0.05
    communication_seconds: float = 60.0

    def __post_init__(self) -> None:
        fewest, most = (1, 10**6) if self.allow_unusual_observed_steps else (FEWEST, MOST)
        if not fewest <= self.observed_steps <= most:
            raise _refused(
                "observed_steps", repr(self.observed_steps), f"{FEWEST} to {MOST}",
                "write such a number, or also allow_unusual_observed_steps: true",
            )  # fmt: skip
        for name in CHECKS:
            if getattr(self, name) not in ("halt", "warn"):
                raise _refused(name, repr(getattr(self, name)), "halt or warn", "write one of them")
        if not 0 < self.throughput_tolerance < 1:
            found = repr(self.throughput_tolerance)
            raise _refused("throughput_tolerance", found, "more than 0, less than 1", "write 0.05")
        if not 0 < self.communication_seconds < 3600:
            found = repr(self.communication_seconds)
            raise _refused("communication_seconds", found, "more than 0, below 3600", "write 60")

    def of(self, check: str) -> str:
        """Gives what a check does when it fails; of a check that is not one of the five, halt."""
        return getattr(self, check) if check in CHECKS else "halt"


def probation_policy(config: Options) -> ProbationPolicy:
    """Gives the policy that `probation` of a config says.

    Raises:
        ConfigError: an unknown name, or a value that is not what its name takes.
    """
    return policy_of(config.probation)


def policy_of(values: Mapping[str, Any] | None) -> ProbationPolicy:
    """Gives the policy of a mapping as it stands under `probation`; likewise strict."""
    return read_section(ProbationPolicy, values, "probation")


def _refused(name: str, found: str, expected: str, action: str) -> ConfigError:
    where = f"{name} in option probation"
    return ConfigError(f"{name} is {found}", expected=expected, where=where, action=action)
