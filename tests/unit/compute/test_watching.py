# SPDX-License-Identifier: Apache-2.0
"""What becomes of a step whose numbers are not finite."""

from types import SimpleNamespace

import pytest
import torch

from mprecipes.compute.culprits import BlockWatch, GradientNorms
from mprecipes.compute.engines import ENGINES
from mprecipes.compute.fallback import Descent
from mprecipes.compute.kept import KeptInFp32
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.precision import MODES
from mprecipes.compute.ranks import Ranks
from mprecipes.compute.scaling import LossScaler
from mprecipes.compute.watching import watch_numerics
from mprecipes.errors import NumericsError

NAN = float("nan")


def watch(mode="bf16", **values):
    policy, model = NumericsPolicy(**values), torch.nn.Linear(2, 2)
    scaler = LossScaler("cpu", policy) if mode == "fp16" else None
    launch = SimpleNamespace(
        ranks=Ranks(), descent=Descent(MODES[mode], policy), scaler=scaler, kept=KeptInFp32(),
        engine=ENGINES["ddp"], policy=policy, device=torch.device("cpu"),
        accelerator=SimpleNamespace(sync_gradients=True),
    )  # fmt: skip
    made = watch_numerics(launch, model)
    assert isinstance(made.blocks, BlockWatch) and isinstance(made.norms, GradientNorms)
    return made


def judge(made, step, *, loss=1.0, norm=1.0, overflow=False):
    def refusal(place):
        return NumericsError("bad", expected="finite", where=place, action="look")

    return made.judge(step, loss=loss, norm=norm, found_inf=overflow, refusal=refusal)


def test_a_clean_step_is_applied():
    """Without a scaler there is no scale to tell."""
    assert judge(watch(), 1) == type(judge(watch(), 1))(False, None, ())


def test_without_a_scaler_a_failure_stops_unless_it_may_be_skipped():
    """`stop` raises the caller's error with mode and place; `skip` leaves the update out."""
    with pytest.raises(NumericsError, match="an unknown place, in precision bf16"):
        judge(watch(), 3, norm=NAN)
    done = judge(watch(on_numeric_failure="skip"), 3, norm=NAN)
    assert done.skipped and done.notes[0].startswith("step 3 skipped: loss 1, gradient norm nan")


def test_skips_in_a_row_end_the_run():
    """Three bad steps with a limit of three; a clean one between them counts anew."""
    made = watch(on_numeric_failure="skip", max_consecutive_skips=3)
    for loss in (NAN, NAN, 1.0, NAN, NAN):
        judge(made, 1, loss=loss)
    with pytest.raises(NumericsError) as caught:
        judge(made, 6, loss=NAN)
    error = caught.value
    assert error.found.startswith("3 steps in a row were skipped") and "within 3" in error.expected
    assert error.where == "step 6, precision bf16" and "keep_in_fp32" in error.action


def test_an_overflow_of_fp16_is_told_in_the_words_people_know():
    """`loss scale A -> B, step N skipped (overflow in X)` and `skipping step, reducing scale`."""
    made = watch("fp16", loss_scale_growth_interval=1)
    done = judge(made, 118, norm=float("inf"), overflow=True)
    assert (done.skipped, done.loss_scale) == (True, 32768.0)
    assert done.notes == (
        "loss scale 65536 -> 32768, step 118 skipped (overflow in an unknown place): "
        "skipping step, reducing scale",
    )
    assert judge(made, 119).notes == ("loss scale 32768 -> 65536 after step 119",)


def test_fp16_at_its_floor_ends_the_run():
    """From scale 4 with floor 1: two halvings, and the third overflow is the end."""
    made = watch("fp16", initial_loss_scale=4.0)
    assert judge(made, 1, overflow=True).loss_scale == 2.0
    assert judge(made, 2, overflow=True).loss_scale == 1.0
    with pytest.raises(NumericsError, match="at loss scale 1, its floor"):
        judge(made, 3, overflow=True)


def test_the_layer_is_named_by_the_gradients_of_the_step():
    """The weight whose gradient was infinite before clipping is in the line."""
    policy, model = NumericsPolicy(), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    launch = SimpleNamespace(
        ranks=Ranks(), descent=Descent(MODES["fp16"], policy), scaler=LossScaler("cpu", policy),
        engine=ENGINES["ddp"], policy=policy, device=torch.device("cpu"), kept=KeptInFp32(),
        accelerator=SimpleNamespace(sync_gradients=True),
    )  # fmt: skip
    made = watch_numerics(launch, model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    made.after_backward()
    assert "(overflow in 0)" in judge(made, 1, overflow=True).notes[0]
