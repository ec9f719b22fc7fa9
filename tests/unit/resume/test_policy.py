# SPDX-License-Identifier: Apache-2.0
"""The option `probation`: its defaults, what it takes, and what it refuses."""

from types import SimpleNamespace

import pytest

import mprecipes as mp
from mprecipes.errors import ConfigError
from mprecipes.resume.policy import ProbationPolicy, policy_of


def test_without_the_option_five_steps_are_observed_and_throughput_warns():
    """The defaults: four checks halt, throughput warns at 5 %."""
    policy = mp.probation_policy(SimpleNamespace(probation=None))
    assert policy == ProbationPolicy()
    assert (policy.observed_steps, policy.throughput_tolerance) == (5, 0.05)
    names = ("weights", "optimizer", "data_order", "communication", "throughput")
    assert [policy.of(name) for name in names] == ["halt"] * 4 + ["warn"]
    assert policy.of("contract") == "halt"


@pytest.mark.parametrize("steps", [2, 6])
def test_another_number_of_steps_needs_its_flag(steps):
    """3 to 5 as they are; others with allow_unusual_observed_steps."""
    with pytest.raises(ConfigError) as error:
        policy_of({"observed_steps": steps})
    assert error.value.found == f"observed_steps is {steps}"
    assert error.value.expected == "3 to 5"
    assert error.value.where == "observed_steps in option probation"
    assert error.value.action == "write such a number, or also allow_unusual_observed_steps: true"
    allowed = policy_of({"observed_steps": steps, "allow_unusual_observed_steps": True})
    assert allowed.observed_steps == steps
    assert [policy_of({"observed_steps": n}).observed_steps for n in (3, 4, 5)] == [3, 4, 5]


@pytest.mark.parametrize(
    ("values", "found", "expected"),
    [
        ({"weights": "ignore"}, "weights is 'ignore'", "halt"),
        ({"throughput_tolerance": 0.0}, "throughput_tolerance is 0.0", "more than 0, less than 1"),
        ({"communication_seconds": -1.0}, "communication_seconds is -1.0", "more than 0"),
        ({"observed_steps": "5"}, "observed_steps is", "a whole number"),
        ({"observed": 5}, "unknown name observed", "observed_steps"),
    ],
)
def test_what_cannot_be_is_refused(values, found, expected):
    """A reaction, a share, a limit or a name that does not exist."""
    with pytest.raises(ConfigError) as error:
        policy_of(values)
    assert error.value.found.startswith(found)
    assert expected in error.value.expected
    assert "option probation" in error.value.where
    assert error.value.action
