# SPDX-License-Identifier: Apache-2.0
"""Case M01: after a resume, all tokens ever were divided by the time since the restart.

Reports: huggingface/transformers#40560; hiyouga/LlamaFactory#7415;
NVIDIA-NeMo/Megatron-Bridge#2350.
"""

import io

import pytest

from mprecipes.data.order import Position
from mprecipes.observe.metrics import ThroughputMeter
from mprecipes.observe.progress import Progress

TOKENS_PER_STEP = 64
STEP_SECONDS = 0.1
TOTAL_STEPS = 40


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float):
        self.now = now

    def __call__(self) -> float:
        return self.now


def train(position: Position, until: int, clock: Clock, startup_seconds: float):
    """Plays one process; gives its position, its rate after every step, and its console lines."""
    console, rates = io.StringIO(), {}
    meter = ThroughputMeter()
    clock.now += startup_seconds
    with Progress(
        TOTAL_STEPS, position.step, logging_steps=1, file=console, clock=clock
    ) as progress:
        while position.step < until:
            clock.now += STEP_SECONDS
            position = position.advance(samples=4, tokens=TOKENS_PER_STEP)
            meter.update(TOKENS_PER_STEP, STEP_SECONDS)
            rates[position.step] = meter.tokens_per_second
            progress.update(
                position.step, loss=1.0, tokens_per_second=rates[position.step], learning_rate=None
            )
    return position, rates, console.getvalue().splitlines()


def test_m01_rates_are_of_this_process_and_totals_are_kept_apart():
    """Cut at 20 of 64-token steps of 0.1 s: 640 tokens/s at step 18 and 22, 1408 tokens in all."""
    saved, before, _ = train(Position(), 20, Clock(5.0), startup_seconds=3.0)
    position, after, lines = train(saved, 22, Clock(900.0), startup_seconds=30.0)
    assert before[18] == pytest.approx(640.0, rel=1e-6)
    assert after[22] == pytest.approx(640.0, rel=0.2)
    assert after[22] == pytest.approx(before[18], rel=0.2)
    assert position.tokens_seen == 1408
    # The time left is of this process too: 18 steps of 0.1 s, not 18 * (30.2 s / 22 steps).
    assert lines[-1].endswith("640 tokens/s  ETA 0:02")
