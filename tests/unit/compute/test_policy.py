# SPDX-License-Identifier: Apache-2.0
"""The option `numerics` is read strictly."""

from types import SimpleNamespace

import pytest

from mprecipes.compute.policy import NumericsPolicy, numerics_policy
from mprecipes.errors import ConfigError


def read(**values):
    return numerics_policy(SimpleNamespace(numerics=values or None))


def test_nothing_said_is_the_defaults():
    """Dynamic scale from 65536, gradients reduced in FP32, a failure stops the run."""
    policy = read()
    assert policy == NumericsPolicy()
    assert (policy.loss_scale, policy.initial_loss_scale) == (None, 65536.0)
    assert (policy.reduce_dtype, policy.on_numeric_failure) == ("fp32", "stop")


def test_what_is_said_is_read():
    """Lists become tuples without repetitions; a whole number is a scale too."""
    policy = read(keep_in_fp32=["a", "b", "a"], loss_scale=1024, on_numeric_failure="fallback")
    assert policy.keep_in_fp32 == ("a", "b") and policy.loss_scale == 1024
    assert policy.on_numeric_failure == "fallback"


@pytest.mark.parametrize(
    ("values", "found", "expected"),
    [
        ({"reduce_dtyp": "fp32"}, "unknown name reduce_dtyp", "reduce_dtype"),
        ({"reduce_dtype": "fp8"}, "reduce_dtype is 'fp8'", "bf16"),
        ({"max_consecutive_skips": 0}, "max_consecutive_skips is 0", "1 or more"),
        ({"loss_scale": -1.0}, "loss_scale is -1.0", "more than 0"),
        ({"loss_scale_growth_factor": 1.0}, "loss_scale_growth_factor is 1.0", "more than 1"),
        ({"loss_scale_backoff_factor": 1.0}, "loss_scale_backoff_factor is 1.0", "between 0 and 1"),
        ({"initial_loss_scale": 0.5}, "initial_loss_scale is 0.5 below", "at least loss_scale_fl"),
        ({"fp8_skip": "head"}, "fp8_skip is 'head'", "list"),
    ],
)
def test_what_is_wrong_is_refused(values, found, expected):
    """The name, the value, what fits, where and what to write."""
    with pytest.raises(ConfigError) as caught:
        read(**values)
    error = caught.value
    assert found in error.found and expected in error.expected
    assert "option numerics" in error.where and error.action


@pytest.mark.parametrize(
    ("word", "why"),
    [("te", "Transformer Engine is not installed"), ("delayed", "capability 8.9+"),
     ("mxfp8", "capability 10.0+"), ("nvfp4", "torchao's prototypes")],
)  # fmt: skip
def test_fp8_that_cannot_be_checked_here_is_refused_with_what_is_lacking(word, why):
    """What is offered, what is missing, and what to write in its place."""
    with pytest.raises(ConfigError) as caught:
        read(fp8_recipe=word)
    error = caught.value
    assert error.found == f"fp8_recipe is '{word}'" and "torchao" in error.expected
    assert error.action.startswith("write fp8_recipe: rowwise. ") and why in error.action
