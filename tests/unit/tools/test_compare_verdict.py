# SPDX-License-Identifier: Apache-2.0
"""Each verdict is given for the numbers it is meant for, and never from one seed."""

import math
import random

import pytest

from mprecipes.tools.compare_verdict import (
    Finding,
    decide,
    interval,
    judge_loss,
    judge_ratio,
    margin_of,
    seeds_needed,
    t95,
)


def test_the_interval_of_three_seeds_is_the_textbook_one():
    """1, 2, 3: mean 2, standard error 1/sqrt(3), t of two degrees of freedom 2.920."""
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert found.low == pytest.approx(2 - 2.920 / math.sqrt(3))
    assert found.high == pytest.approx(2 + 2.920 / math.sqrt(3))


@pytest.mark.parametrize(("degrees", "right"), [(1, 6.314), (2, 2.920), (30, 1.697), (60, 1.671)])
def test_quantiles_of_students_t(degrees, right):
    """As in printed tables, and by its expansion beyond them."""
    assert t95(degrees) == pytest.approx(right, abs=2e-3)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Of 2000 draws of 3 seeds, 90 % of the intervals hold the true mean; within 2 points."""
    draw = random.Random(1)
    found = [interval([draw.gauss(0.5, 2.0) for _ in range(3)]) for _ in range(2000)]
    assert 0.88 < sum(i.low < 0.5 < i.high for i in found) / 2000 < 0.92


def test_the_margin_has_a_floor_and_a_ceiling():
    """0.25 % of the loss, or FP32's spread where that is more, never above 1 %."""
    assert margin_of([4.0, 4.0, 4.0]) == pytest.approx(0.01)
    assert margin_of([4.0, 4.02, 3.98]) == pytest.approx(0.02)
    assert margin_of([3.0, 4.0, 5.0]) == pytest.approx(0.04)
    assert margin_of([4.0]) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([0.001, -0.001, 0.000], "equivalent"),
        ([0.050, 0.052, 0.051], "worse"),
        ([-0.050, -0.052, -0.051], "better"),
        ([0.030, -0.030, 0.001], "undecided"),
        ([0.000, 0.010, 0.020], "undecided"),
        ([0.0, 0.0, 0.0], "equivalent"),
        ([0.3], "undecided"),
    ],
)
def test_the_loss_is_judged_by_its_whole_interval(differences, word):
    """Not by its mean: 0.030 and -0.030 average to nothing and show nothing."""
    assert judge_loss(differences, 0.01).word == word


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ([1.30, 1.31, 1.29], "faster"),
        ([1.02, 1.021, 1.019], "same"),
        ([0.7, 0.71, 0.69], "slower"),
        ([2.0, 0.6, 1.4], "same"),
        ([1.5], "undecided"),
    ],
)
def test_a_gain_must_be_large_and_sure(ratios, word):
    """2 % is none, and neither is 30 % in one seed and a loss in another."""
    assert judge_ratio(ratios, "faster", "slower").word == word


def test_less_memory_is_smaller():
    """The ratio is shown as it is, 0.8 of FP32's memory, and a larger one is no gain."""
    found = judge_ratio([0.80, 0.81, 0.79], "smaller", "larger", less_is_better=True)
    assert (found.word, found.text[:5]) == ("smaller", "0.80x")
    assert judge_ratio([1.3, 1.31, 1.29], "smaller", "larger", less_is_better=True).word == "larger"


FASTER = Finding("faster", None, "1.30x")
SLOWER = Finding("slower", None, "0.70x")
SMALLER = Finding("smaller", None, "0.80x")


@pytest.mark.parametrize(
    ("quality", "speed", "memory", "seeds", "word"),
    [
        ("equivalent", FASTER, None, 3, "equivalent"),
        ("equivalent", SLOWER, SMALLER, 3, "equivalent"),
        ("better", FASTER, None, 3, "equivalent"),
        ("worse", FASTER, None, 3, "faster but worse"),
        ("worse", SLOWER, None, 3, "no gain"),
        ("equivalent", SLOWER, None, 3, "no gain"),
        ("diverges", FASTER, SMALLER, 3, "diverges"),
        ("undecided", FASTER, None, 3, "not enough seeds"),
        ("equivalent", FASTER, None, 1, "not enough seeds"),
        ("diverges", FASTER, None, 1, "not enough seeds"),
    ],
)
def test_every_verdict(quality, speed, memory, seeds, word):
    """The table of verdicts, one seed included, which never gives any."""
    found = decide(Finding(quality, None, "+0.1"), speed, memory, num_seeds=seeds)
    assert found.word == word
    assert found.reason


def test_what_would_decide_is_said():
    """0.4 +- 1 of a margin of 1: 10 seeds bring the interval inside it."""
    assert seeds_needed([-0.6, 0.4, 1.4], 1.0) == 10
    assert seeds_needed([0.99, 0.2, 1.81], 1.0) == 4
    verdict = decide(Finding("undecided", None, "x"), None, None, num_seeds=3, needed=10)
    assert "about 10 would decide" in verdict.reason


def test_what_a_gain_costs_is_said():
    """Smaller at a tenth of the speed is told with both figures."""
    found = Finding("equivalent", None, "+0.0000 nats")
    verdict = decide(found, SLOWER, SMALLER, num_seeds=3)
    assert verdict.reason == "smaller (0.80x), but slower (0.70x); loss +0.0000 nats"
