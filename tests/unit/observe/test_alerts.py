# SPDX-License-Identifier: Apache-2.0
"""Gradient norms that explode or vanish and losses that stay are told once; clean ones are not."""

import copy
import math
import random
from dataclasses import replace

import pytest

from mprecipes.observe.alerts import Alerts
from mprecipes.observe.policy import WatchPolicy

SHORT = WatchPolicy(spike_window=16, plateau_updates=200, plateau_gain=0.01)


def titles(policy, losses, norms):
    """Gives (update, title) of every alert; the shorter list's last value is repeated."""
    alerts = Alerts(policy)
    pairs = zip(losses, norms)
    return [
        (number, title)
        for number, (loss, norm) in enumerate(pairs, start=1)
        for title, _ in alerts.judge(loss, norm)
    ]


FALLING = [4.0 - step / 100 for step in range(300)]


@pytest.mark.parametrize(
    ("norm", "title"), [(11.0, "spike"), (0.09, "collapse"), (0.0, "collapse")]
)
def test_norms_far_from_their_median_are_told_once(norm, title):
    """Three updates in a row ten times above or below 1: the third is told, the fourth is not."""
    norms = [1.0] * 20 + [norm] * 4 + [1.0] * 20
    assert titles(SHORT, FALLING, norms) == [(23, f"gradient {title}")]


def test_two_are_not_enough_and_the_next_three_are_told_again():
    """The row is counted anew after one that is near."""
    norms = [1.0] * 20 + [99.0, 99.0, 1.0] + [99.0] * 3 + [1.0] * 9 + [99.0] * 3
    found = titles(replace(SHORT, spike_window=64), FALLING, norms)
    assert found == [(26, "gradient spike"), (38, "gradient spike")]


def test_a_norm_that_is_not_finite_is_told_elsewhere():
    """It neither counts nor enters the window."""
    assert titles(SHORT, FALLING, [1.0] * 20 + [math.nan] * 5 + [1.0] * 5) == []


def test_the_text_of_an_alert_holds_its_numbers():
    """Found, median and how many were compared."""
    alerts = Alerts(SHORT)
    found = [text for norm in [1.0] * 8 + [50.0] * 3 for _, text in alerts.judge(2.0, norm)]
    assert found == ["gradient norm 50, the median of 10 updates is 1, 3 updates running"]


def test_a_loss_that_stays_is_a_plateau():
    """Noise of 1 % around 2 over 200 updates hides no gain of 1 %: told once."""
    draw = random.Random(1)
    losses = [2 + draw.gauss(0, 0.02) for _ in range(600)]
    found = titles(SHORT, losses, [1.0] * 600)
    assert [title for _, title in found] == ["loss plateau"]
    assert 200 <= found[0][0] <= 300


def test_noise_that_could_hide_the_gain_is_no_plateau():
    """With noise of 20 % nothing can be said after 200 updates, also where the means are equal."""
    losses = [2.4, 1.6] * 110
    assert titles(SHORT, losses, [1.0] * 220) == []


def test_what_is_off_is_not_judged():
    """Without factor and plateau nothing is told."""
    off = replace(SHORT, grad_norm_factor=None, plateau_updates=None)
    assert titles(off, [2.0] * 600, [1.0] * 300 + [1e9] * 300) == []


def test_clean_runs_raise_no_alert(capsys):
    """200 synthetic runs of 700 updates, ten of 2500 by default; planted faults are all seen."""
    alarms, spikes, collapses = 0, 0, 0
    for number in range(200):
        draw = random.Random(number)
        floor, noise = draw.uniform(0.5, 2.0), draw.choice([0.003, 0.01, 0.03])
        spread, length = draw.uniform(0.05, 0.5), 700 if number % 20 else 2500
        alerts = Alerts(replace(WatchPolicy(), plateau_updates=600 if number % 20 else 2000))
        for step in range(1, length + 1):
            loss = (floor + 6 * (1 + step / 20) ** -0.35) * (1 + noise * draw.gauss(0, 1))
            alarms += len(alerts.judge(loss, math.exp(draw.gauss(0, spread)) * (1 + 9 / step)))
        for norm in (60.0, 0.01):
            planted = copy.deepcopy(alerts)
            found = [title for _ in range(3) for title, _ in planted.judge(loss, norm)]
            spikes += found == ["gradient spike"]
            collapses += found == ["gradient collapse"]
    with capsys.disabled():
        print(
            f"\nalerts: {alarms} in 200 clean runs; {spikes} spikes, {collapses} collapses of 200"
        )
    assert (alarms, spikes, collapses) == (0, 200, 200)
