# SPDX-License-Identifier: Apache-2.0
"""Colours are one an arm, and means are over what all runs have."""

import pytest

from mprecipes.observe.curves import MODE_COLORS, colors_of, mean_curve, smoothed
from tests.stories import shown


def test_an_arm_has_its_modes_colour_unless_it_is_taken():
    """A second BF16 arm gets a colour of its own, an unknown mode too."""
    runs = [shown("fp32", 0), shown("bf16", 0), shown("bf16", 1),
            shown("bf16:keep_in_fp32=norm", 0, mode="bf16"), shown("odd", 0)]  # fmt: skip
    colors = colors_of(runs)
    assert (colors["fp32"], colors["bf16"]) == (MODE_COLORS["fp32"], MODE_COLORS["bf16"])
    assert len(set(colors.values())) == len(colors) == 4


def test_means_are_over_the_steps_all_have():
    """A run that ended early shortens the mean, it does not bend it."""
    assert mean_curve([{1: 1.0, 2: 2.0, 3: 3.0}, {1: 3.0, 2: 4.0}]) == {1: 2.0, 2: 3.0}
    assert mean_curve([]) == {}


@pytest.mark.parametrize(("length", "right"), [(3, 3.0), (40, 39.5)])
def test_smoothing_is_a_twentieth_wide(length, right):
    """Of 40 points each is a mean of two; of three it is the point itself."""
    assert smoothed({step: float(step) for step in range(1, length + 1)})[length] == right
