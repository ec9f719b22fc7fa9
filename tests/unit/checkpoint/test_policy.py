# SPDX-License-Identifier: Apache-2.0
"""What a run saves and keeps is checked before it starts."""

from types import SimpleNamespace

import pytest

from mprecipes.checkpoint.policy import CheckpointPolicy, checkpoint_policy, split_metric
from mprecipes.errors import ConfigError


def config(checkpoint=None, **options):
    common = {"save_steps": 500, "keep_last": 3, "max_steps": 5000, "eval_steps": 100}
    return SimpleNamespace(**{**common, **options}, checkpoint=checkpoint)


def refusal(checkpoint=None, **options):
    with pytest.raises(ConfigError) as caught:
        checkpoint_policy(config(checkpoint, **options))
    return caught.value


def test_without_the_option_the_defaults_hold():
    """No mapping gives the defaults with the recipe's save_steps and keep_last."""
    policy = checkpoint_policy(config(save_steps=7, keep_last=2))
    assert policy == CheckpointPolicy(save_steps=7, keep_last=2)
    assert (policy.mirror, policy.keep_best, policy.milestone_steps) == (None, None, ())
    assert (policy.on_save_failure, policy.synchronous) == ("continue", False)


def test_every_name_is_read():
    """All names with good values arrive typed; steps are sorted and each counts once."""
    policy = checkpoint_policy(
        config(
            {
                "save_minutes": 30, "keep_every": 1000, "keep_best": "eval/loss",
                "milestone_steps": [200, 100, 200], "mirror": "s3://bucket/runs",
                "on_save_failure": "stop", "verify_every_hours": 0.5,
                "preemption_grace_seconds": 90, "synchronous": True,
            }
        )
    )  # fmt: skip
    assert policy.save_minutes == 30.0 and isinstance(policy.save_minutes, float)
    assert policy.milestone_steps == (100, 200)
    assert (policy.keep_every, policy.keep_best) == (1000, "eval/loss")
    assert (policy.mirror, policy.on_save_failure) == ("s3://bucket/runs", "stop")
    assert (policy.verify_every_hours, policy.preemption_grace_seconds) == (0.5, 90.0)
    assert policy.synchronous is True


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ({"eval_steps": None}, "no step is evaluated and saved (eval_steps none, save_steps 500)"),
        ({"eval_steps": 300, "max_steps": 1400}, "(eval_steps 300, save_steps 500)"),
    ],
)
def test_a_best_that_is_never_known_is_refused(steps, found):
    """Else the option would be there and keep nothing."""
    error = refusal({"keep_best": "eval/loss"}, **steps)
    assert found in error.found and error.where == "keep_best in option checkpoint"
    assert error.expected == f"a step of both within max_steps {steps.get('max_steps', 5000)}"
    assert "--save_steps" in error.action
    for met in ({"max_steps": 1500}, {"milestone_steps": [300]}):
        options = {"max_steps": 1400, "eval_steps": 300, **met}
        asked = {"keep_best": "eval/loss", "milestone_steps": options.pop("milestone_steps", [])}
        assert checkpoint_policy(config(asked, **options)).keep_best == "eval/loss"


def test_an_unknown_name_is_refused_with_the_nearest():
    """A misspelt name says what was meant."""
    error = refusal({"keep_bets": "eval/loss"})
    assert error.found == "unknown name keep_bets"
    assert error.expected == "keep_best"
    assert error.where == "option checkpoint"
    assert error.action == "write keep_best, or remove it"


@pytest.mark.parametrize("name", ["keep_last", "save_steps"])
def test_options_of_their_own_are_not_said_twice(name):
    """keep_last and save_steps belong to the recipe, not into the mapping."""
    error = refusal({name: 2})
    assert error.expected == f"the option {name}"
    assert f"--{name}" in error.action


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"keep_every": 0}, "keep_every is 0"),
        ({"keep_every": 1.5}, "keep_every is 1.5 (number)"),
        ({"save_minutes": 0}, "save_minutes is 0.0"),
        ({"save_minutes": "often"}, "save_minutes is 'often' (text)"),
        ({"verify_every_hours": -1}, "verify_every_hours is -1.0"),
        ({"milestone_steps": 100}, "milestone_steps is 100 (whole number)"),
        ({"milestone_steps": [5, 0]}, "milestone_steps is 0"),
        ({"milestone_steps": [True]}, "milestone_steps is true (true/false)"),
        ({"on_save_failure": "ignore"}, "on_save_failure is 'ignore' (text)"),
        ({"synchronous": 1}, "synchronous is 1 (whole number)"),
        ({"mirror": "backup/runs"}, "mirror is 'backup/runs'"),
        ({"keep_best": "loss"}, "keep_best is 'loss'"),
        ({"preemption_grace_seconds": 0}, "preemption_grace_seconds is 0.0"),
    ],
)
def test_wrong_values_are_refused(values, found):
    """Types and ranges are checked, and all four parts of the message are there."""
    error = refusal(values)
    (name,) = values
    assert error.found == found
    assert error.where == f"{name} in option checkpoint"
    assert error.expected and error.action
    assert error.exit_code == 2


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keeping_none_is_refused(keep_last):
    """A policy that would delete every checkpoint cannot be asked for."""
    error = refusal(keep_last=keep_last)
    assert error.found == f"keep_last is {keep_last}"
    assert error.expected == "1 or more"
    assert error.where == "option keep_last"
    assert error.action == "write 1 or more"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eval/loss", ("eval/loss", "min")),
        ("eval/perplexity", ("eval/perplexity", "min")),
        ("eval/token_accuracy", ("eval/token_accuracy", "max")),
        ("eval/score:max", ("eval/score", "max")),
        ("eval/loss:max", ("eval/loss", "max")),
        ("eval/token_accuracy:min", ("eval/token_accuracy", "min")),
    ],
)
def test_the_direction_follows_the_name_unless_said(text, expected):
    """Losses are best when low, accuracies when high; what is written out wins."""
    assert split_metric(text) == expected


@pytest.mark.parametrize("text", ["eval/score", "eval/loss:best", "eval/loss:", "eval/", ""])
def test_a_metric_of_unknown_direction_is_refused(text):
    """Nothing is guessed about what is best."""
    with pytest.raises(ConfigError) as caught:
        split_metric(text)
    assert caught.value.where == "keep_best in option checkpoint"
    assert caught.value.expected and caught.value.action and caught.value.found
