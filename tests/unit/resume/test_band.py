# SPDX-License-Identifier: Apache-2.0
"""The band that stands in for a first pass."""

import math

import pytest

from mprecipes.resume.band import make_band, outside


@pytest.fixture
def steps(record):
    """Gives records 1 .. n of a falling loss with a ripple."""

    def make(first, last, **changes):
        return [
            record(
                n, **{"loss": 4.0 - n / 50 + 0.01 * (-1) ** n, "grad_norm": 1.0 + n % 3 / 10,
                      **changes},
            )
            for n in range(first, last + 1)
        ]  # fmt: skip

    return make


def test_steps_that_go_on_as_before_are_inside(steps):
    """Five more steps on the same line."""
    band = make_band(steps(1, 32))
    assert outside(band, steps(33, 37)) == []
    low, high = band.loss(33)
    assert low < 4.0 - 33 / 50 < high
    assert "of 32 steps before the save" in band.formula


def test_a_loss_that_jumped_back_is_outside(steps):
    """Where training began anew: the values are named with the limits."""
    band = make_band(steps(1, 32))
    (found,) = outside(band, steps(33, 37, loss=5.5))
    assert found.startswith("loss 5.5 (median), outside ")


def test_a_gradient_norm_of_three_times_is_outside(steps):
    """Up to twice the median is inside at least."""
    band = make_band(steps(1, 32, grad_norm=1.0))
    assert band.grad_norm == pytest.approx((0.5, 2.0))
    assert outside(band, steps(33, 37, grad_norm=1.9)) == []
    (found,) = outside(band, steps(33, 37, grad_norm=3.0))
    assert found == "grad_norm 3 (median), outside 0.5 to 2"


def test_one_odd_step_of_five_is_no_verdict(steps):
    """Judged is the median of the observed steps."""
    band = make_band(steps(1, 32))
    assert outside(band, [*steps(33, 36), *steps(37, 37, loss=9.0)]) == []


def test_fewer_than_eight_steps_make_no_band(steps):
    """And steps that are not finite do not count."""
    assert make_band(steps(1, 7)) is None
    assert make_band([*steps(1, 7), *steps(8, 8, loss=math.nan)]) is None
    assert make_band(steps(1, 8)).num_steps == 8
    assert make_band(steps(1, 50)).num_steps == 32
