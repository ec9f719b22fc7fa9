# SPDX-License-Identifier: Apache-2.0
"""Tokens per second before and after, with an injected clock."""

import pytest

from mprecipes.resume.rates import Rates, judge, slow_ranks


def fed(seconds, tokens=1000, count=31, observed=False):
    """Gives rates after a slow first step and `count - 1` steps of these seconds."""
    rates = Rates()
    rates.add(tokens, 9.0, observed=observed)
    for _ in range(count - 1):
        rates.add(tokens, seconds, observed=observed)
    return rates


def test_the_first_step_is_left_out_and_windows_are_of_five_steps():
    """30 steps of 0.1 s after one of 9 s: six windows, 10,000 tokens/s, no spread."""
    assert fed(0.1).facts() == {
        "tokens_per_second": pytest.approx(10000.0),
        "mad": pytest.approx(0.0, abs=1e-6),
        "windows": 6,
        "window_steps": 5,
    }
    assert fed(0.1, count=15).facts() is None


def test_the_spread_is_the_median_absolute_deviation():
    """Windows of 100, 110 and 150 tokens/s: median 110, deviations 10, 0, 40."""
    rates = Rates()
    rates.add(1, 1.0)
    for speed in (100, 110, 150):
        for _ in range(5):
            rates.add(speed, 1.0)
    facts = rates.facts()
    assert (facts["tokens_per_second"], facts["mad"]) == (110.0, 10.0)


@pytest.mark.parametrize(("slower", "flagged"), [(0.049, False), (0.051, True), (-0.3, False)])
def test_five_percent_slower_is_the_limit(slower, flagged):
    """4.9 % slower passes, 5.1 % slower is flagged, faster passes."""
    stored = fed(0.1).facts()
    observed = fed(0.1 / (1.0 - slower), count=6, observed=True).observed
    assert len(observed) == 5
    verdict = judge(observed, stored, 0.05)
    assert verdict.is_slower is flagged
    assert verdict.missing == pytest.approx(slower)
    assert (verdict.allowed, verdict.source) == (0.05, "throughput_tolerance 0.05")


def test_a_noisy_machine_is_judged_by_its_noise():
    """A spread of 4 % before allows 12 %; 11 % passes and 13 % does not."""
    stored = {"tokens_per_second": 100.0, "mad": 4.0, "windows": 9, "window_steps": 5}
    assert not judge([89.0] * 5, stored, 0.05).is_slower
    verdict = judge([87.0] * 5, stored, 0.05)
    assert verdict.is_slower
    assert verdict.allowed == pytest.approx(0.12)
    assert verdict.source == "3 x the median absolute deviation of 9 windows"


def test_without_a_measure_there_is_no_verdict():
    """A checkpoint without throughput, or no observed step."""
    assert judge([1.0], None, 0.05) is None
    assert judge([], {"tokens_per_second": 1.0, "mad": 0.0, "windows": 3}, 0.05) is None


def test_the_slow_rank_is_named():
    """Rank 2 computes 30 % longer than the median rank."""
    assert slow_ranks([0.10, 0.101, 0.13, 0.10], 0.05) == [
        "rank 2: 0.1300 s, the median rank 0.1000 s (+30%)"
    ]
    assert slow_ranks([0.1], 0.05) == []
