# SPDX-License-Identifier: Apache-2.0
"""The plan of what may be deleted, and why the rest stays."""

import pytest

from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.checkpoint.retention import Decision, best_step, plan_retention
from mprecipes.errors import ConfigError

LOSSES = {100: {"eval/loss": 3.0}, 200: {"eval/loss": 2.0}, 300: {"eval/loss": 2.5}}


def gone(steps, protected=(), keep_last=3, **rules):
    """Gives the steps that a plan gives up, in its order."""
    names = ("keep_every", "keep_best")
    policy = CheckpointPolicy(
        keep_last=keep_last, **{name: rules.pop(name) for name in names if name in rules}
    )
    rules["protected"] = dict.fromkeys(protected, "resumed from")
    return [each.step for each in plan_retention(steps, policy, **rules) if not each.keep]


@pytest.mark.parametrize(
    ("steps", "keep_last", "protected", "expected"),
    [
        ([1, 2, 3, 4], 2, set(), [1, 2]),
        ([1000, 999, 9, 10, 99, 100], 2, set(), [9, 10, 99, 100]),
        ([1, 2, 3, 4], 1, set(), [1, 2, 3]),
        ([1, 2, 3, 4], 2, {1}, [2]),
        ([1, 2, 3, 4], 2, {4}, [1]),
        ([1, 2], 3, set(), []),
        ([], 1, {5}, []),
        ([3, 3, 3], 1, set(), []),
    ],
)
def test_the_newest_stay(steps, keep_last, protected, expected):
    """The newest by number stay, protected ones stay beside them, the rest goes oldest first."""
    assert gone(steps, protected, keep_last) == expected


def test_the_newest_is_never_given_up():
    """A plan that keeps nothing cannot be asked for."""
    with pytest.raises(ConfigError):
        gone([1, 2], keep_last=0)


def test_every_nth_stays_and_uses_up_no_place():
    """Multiples of keep_every stay beside the newest others."""
    assert gone([100, 150, 200, 250, 300, 350], keep_last=1, keep_every=100) == [150, 250]


@pytest.mark.parametrize(
    ("metric", "kept"), [("eval/loss", 200), ("eval/loss:max", 100), ("eval/loss:min", 200)]
)
def test_the_best_stays(metric, kept):
    """The best measured step stays whatever its age."""
    expected = sorted({100, 200, 300} - {kept})
    steps = [100, 200, 300, 400]
    assert gone(steps, keep_last=1, keep_best=metric, evaluations=LOSSES) == expected


def test_the_best_is_among_what_is_there_and_was_measured():
    """A deleted best, a value that is no number and an unmeasured step are not chosen."""
    assert best_step("eval/loss", LOSSES, {100, 300}) == 300
    assert best_step("eval/loss", {**LOSSES, 400: {"eval/loss": float("nan")}}, {100, 400}) == 100
    assert best_step("eval/loss", {5: {"eval/other": 1.0}}, {5, 6}) is None
    assert best_step(None, LOSSES, {100}) is None


def test_of_equal_values_the_latest_is_best():
    """Of two equally good ones the one that was trained longer stays."""
    equal = {step: {"eval/token_accuracy": 0.5} for step in (9, 10, 8)}
    assert best_step("eval/token_accuracy", equal, {8, 9, 10}) == 10


def test_a_damaged_one_neither_counts_nor_goes():
    """One that does not verify takes no place from good ones and is left for quarantine."""
    assert gone([1, 2, 3, 4], keep_last=2, damaged={3}) == [1]
    assert gone([1, 2, 3], keep_last=1, damaged={2, 3}) == []
    assert gone([100, 200], keep_last=1, keep_best="eval/loss", evaluations=LOSSES,
                damaged={200}) == []  # fmt: skip


def test_every_decision_has_its_reason():
    """The plan says of each step why it stays or goes, and the strongest reason stands first."""
    policy = CheckpointPolicy(keep_last=2, keep_every=400, keep_best="eval/loss")
    plan = plan_retention(
        [100, 200, 250, 300, 400, 500, 600, 700, 800], policy, evaluations=LOSSES,
        pinned={250, 200}, protected={500: "this run resumed from it"}, damaged={800},
    )  # fmt: skip
    assert plan == [
        Decision(100, False, "older than the newest 2"),
        Decision(200, True, "pinned"),
        Decision(250, True, "pinned"),
        Decision(300, False, "older than the newest 2"),
        Decision(400, True, "every 400 steps"),
        Decision(500, True, "this run resumed from it"),
        Decision(600, True, "one of the newest 2"),
        Decision(700, True, "one of the newest 2"),
        Decision(800, True, "does not verify; the next start moves it to quarantine"),
    ]


def test_the_reason_of_the_best_names_its_metric():
    """The best says of what."""
    policy = CheckpointPolicy(keep_last=1, keep_best="eval/loss")
    (best, _, _) = plan_retention([200, 300, 400], policy, evaluations=LOSSES)
    assert best == Decision(200, True, "best eval/loss")
