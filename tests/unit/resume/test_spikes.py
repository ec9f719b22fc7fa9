# SPDX-License-Identifier: Apache-2.0
"""What is a loss spike and what is not, from losses alone."""

import json
import math
import random

import pytest

from mprecipes.resume.spikes import SpikeDetector


def detector(window=16, mads=6.0, updates=3, **more):
    return SpikeDetector(window, mads, updates, **more)


def judge(judged, losses, first=1):
    """Gives the answers to these losses, one a step; sample numbers are ten times the step's."""
    return [
        judged.judge(step, 10 * step, loss, 1.0) for step, loss in enumerate(losses, start=first)
    ]


KNOWN = [2.0, 2.1, 1.9, 2.0, 2.2, 1.8, 2.1, 1.9]  # median 2.0, MAD 0.1: high is above 2.6


def test_three_high_losses_in_a_row_are_a_spike():
    """The third is judged by the window that holds the two before; it began with the first."""
    judged = detector()
    judge(judged, KNOWN)
    assert judged.limit == pytest.approx(2.6)
    assert judge(judged, [3.0, 3.1], first=9) == [None, None]
    assert (judged.since, judged.running) == ((9, 90), 2)
    (reason,) = judge(judged, [3.2], first=11)
    assert reason.startswith("loss 3.2 is above 2.9")
    assert reason.endswith("of 10 updates) for 3 updates running")
    assert (judged.since, judged.running) == ((9, 90), 3)


def test_two_high_losses_are_noise():
    """One that is not high ends the row, and the count begins anew."""
    judged = detector()
    judge(judged, KNOWN)
    assert judge(judged, [3.0, 3.0, 2.0, 9.0, 9.0], first=9) == [None] * 5
    assert (judged.since, judged.running) == ((12, 120), 2)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan)])
def test_what_is_not_finite_is_a_spike_at_once(loss, norm):
    """Also when nothing is known yet; it does not enter the window."""
    judged = detector()
    assert judged.judge(1, 10, loss, norm) == f"loss {loss}, gradient norm {norm}"
    assert judged.since == (1, 10)
    assert judged.state()["losses"] == []


def test_nothing_is_high_before_a_quarter_of_the_window_is_known():
    """Of a window of 16 the fifth loss is the first that is judged."""
    judged = detector(updates=1)
    assert judge(judged, [1.0, 90.0, 1.0, 1.1]) == [None] * 4
    assert math.isfinite(judged.limit)


def test_a_loss_that_repeats_itself_may_move_a_little():
    """With a MAD of 0 a thousandth of the median counts: 2.012 is the limit of 2.0."""
    judged = detector(updates=1)
    judge(judged, [2.0] * 8)
    assert judge(judged, [2.011, 2.013], first=9) != [None, None]
    assert judged.since == (10, 100)


def test_the_state_goes_through_json_and_judges_the_same():
    """A detector made of another's state gives the same answers from there on."""
    draw = random.Random(3)
    losses = [2.0 + draw.gauss(0, 0.1) for _ in range(40)] + [5.0] * 3
    whole = detector()
    expected = judge(whole, losses)
    assert expected[-1] is not None
    first = detector()
    judge(first, losses[:41])
    second = detector(state=json.loads(json.dumps(first.state())))
    assert judge(second, losses[41:], first=42) == expected[41:]
    assert second.state() == whole.state()


def curve(number, length=400):
    """A clean loss curve: its own start, floor, speed, noise, and every tenth one with heavy tails.

    Falls as a power of the step with warm-up, which also rises a little at first.
    """
    draw = random.Random(number)
    start, floor = draw.uniform(4, 11), draw.uniform(0.5, 3.0)
    power, noise = draw.uniform(0.2, 0.7), draw.choice([0.003, 0.01, 0.03, 0.1])
    for step in range(1, length + 1):
        middle = floor + (start - floor) * (1 + step / 10) ** -power
        factor = draw.gauss(0, 1)
        if number % 10 == 0:  # Student's t with 3 degrees of freedom
            factor /= math.sqrt(sum(draw.gauss(0, 1) ** 2 for _ in range(3)) / 3)
        yield middle * (1 + noise * factor)


def test_clean_curves_raise_no_alarm(capsys):
    """200 synthetic curves of 400 updates, none of them a spike; with one planted, all are."""
    alarms, seen = 0, 0
    for number in range(200):
        judged = detector(window=128)
        losses = list(curve(number))
        alarms += any(judge(judged, losses))
        seen += judge(judged, [2 * loss + 2 for loss in losses[-3:]], first=401)[-1] is not None
    with capsys.disabled():
        print(f"\nspike guard: {alarms} alarms in 200 clean curves, {seen} of 200 planted seen")
    assert (alarms, seen) == (0, 200)
