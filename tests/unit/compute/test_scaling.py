# SPDX-License-Identifier: Apache-2.0
"""The loss scale: when it grows, when it falls, and what a resume gives it."""

import pytest
import torch

from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.scaling import LossScaler, ScaleChange, exact


def scaler(**values):
    return LossScaler("cpu", NumericsPolicy(**values))


def clean(made, count=1):
    return [made.settle(overflowed=False).after for _ in range(count)]


def test_it_doubles_after_exactly_the_growth_interval_e02():
    """Case E02: from 1024 with interval 3 the scale after each of 7 steps is the published list."""
    made = scaler(initial_loss_scale=1024.0, loss_scale_growth_interval=3)
    assert clean(made, 7) == [1024, 1024, 2048, 2048, 2048, 4096, 4096]


def test_the_growth_counter_survives_e02():
    """Case E02: saved after 2 good steps with counter 2; one more good step grows, counter 0."""
    settings = {"initial_loss_scale": 1024.0, "loss_scale_growth_interval": 3}
    before = scaler(**settings)
    clean(before, 2)
    state = before.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (1024.0, 2)
    after = scaler(**settings)
    after.load_state_dict(state)
    assert clean(after) == [2048.0]
    assert after.state_dict()["_growth_tracker"] == 0


def test_it_halves_at_an_overflow_and_counts_anew():
    """An overflow after 2 clean steps halves; 3 more clean ones are needed to double."""
    made = scaler(initial_loss_scale=1024.0, loss_scale_growth_interval=3)
    clean(made, 2)
    assert made.settle(overflowed=True) == ScaleChange(1024.0, 512.0)
    assert clean(made, 3) == [512, 512, 1024]


def test_hysteresis_waits_for_a_second_overflow():
    """With hysteresis 2 the first overflow leaves the scale; growth counts it anew."""
    made = scaler(loss_scale_hysteresis=2, loss_scale_growth_interval=1)
    assert made.settle(overflowed=True).after == 65536
    assert made.settle(overflowed=True).after == 32768
    assert clean(made) == [65536]
    assert made.settle(overflowed=True).after == 65536


def test_it_stops_at_its_floor():
    """The scale never falls below the floor, and says that it is there."""
    made = scaler(initial_loss_scale=4.0, loss_scale_floor=3.0)
    assert not made.is_at_floor
    assert made.settle(overflowed=True).after == 3.0
    assert made.is_at_floor
    assert made.settle(overflowed=True).after == 3.0
    assert made.consecutive_skips == 2
    clean(made)
    assert made.consecutive_skips == 0


def test_a_static_scale_stays():
    """Neither overflows nor clean steps nor a checkpoint change it."""
    made = scaler(loss_scale=8.0, loss_scale_growth_interval=1)
    assert made.settle(overflowed=True).after == clean(made)[0] == 8.0
    made.load_state_dict(scaler().state_dict())
    assert made.current == made.get_scale() == 8.0 and not made.is_at_floor


@pytest.mark.parametrize("fused", [True, False])
def test_unscaled_gradients_and_overflows_are_noted(fused):
    """`unscale_` divides by the scale; an infinite gradient is found whatever the optimizer."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    made = scaler(initial_loss_scale=256.0)
    made.scale((weight * 3.0).sum()).backward()
    assert weight.grad.tolist() == [768.0, 768.0]
    made.unscale_(optimizer)
    assert weight.grad.tolist() == [3.0, 3.0] and made.found_inf().item() == 0
    made.settle(overflowed=False)
    made.step(optimizer)
    made.update()
    assert weight[0].item() < 1.0
    weight.grad.fill_(float("inf"))
    made.unscale_(optimizer)
    assert made.found_inf().item() > 0
    made.settle(overflowed=True)
    assert made.scale(torch.ones(())).item() == 128.0
    weight.grad.fill_(1.0)
    made.unscale_(optimizer)  # a skipped step leaves the scaler ready for the next one
    assert made.found_inf().item() == 0


def test_scales_are_written_as_people_write_them():
    """65536 and not 6.55e+04."""
    assert str(ScaleChange(65536.0, 32768.0)) == "65536 -> 32768"
    assert str(ScaleChange(8.0, 8.0)) == "8" and exact(0.5) == "0.5"
