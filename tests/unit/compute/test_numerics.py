# SPDX-License-Identifier: Apache-2.0
"""The facts of a step: loss, norm, digest; and the refusal of what is not finite."""

import pytest
import torch

from mprecipes.compute.numerics import StepMeter, batch_digest
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import ConfigError, NumericsError


def rows(*ids, ignore=0):
    tokens = torch.tensor(ids)
    labels = tokens.clone()
    labels[:, :ignore] = -100
    return {"input_ids": tokens, "labels": labels}


def hexdigest(tensors):
    return f"{int(batch_digest(tensors)) % (1 << 64):016x}"


def test_digest_is_a_sum_over_sequences():
    """Splitting and reordering the sequences of a batch leaves the sum where it was."""
    whole = int(batch_digest(rows([1, 2, 3], [4, 5, 6], [7, 8, 9])))
    parts = int(batch_digest(rows([7, 8, 9])) + batch_digest(rows([4, 5, 6], [1, 2, 3])))
    assert (whole - parts) % (1 << 64) == 0


def test_digest_sees_tokens_positions_and_targets():
    """One token, two swapped tokens, and one masked target each give another digest."""
    base = hexdigest(rows([1, 2, 3]))
    assert (
        len(
            {
                base,
                hexdigest(rows([1, 2, 4])),
                hexdigest(rows([2, 1, 3])),
                hexdigest(rows([1, 2, 3], ignore=1)),
            }
        )
        == 4
    )


def test_step_loss_weighs_every_target_alike():
    """Case F04: of 4 and 60 targets the loss is the sum over 64, not a mean of means."""
    meter = StepMeter(Ranks())
    meter.add(0, rows([1, 2]), torch.tensor(8.0))
    meter.add(1, rows([3, 4]), torch.tensor(60.0))
    facts = meter.reduce(1, num_targets=64, grad_norm=torch.tensor(0.5), stop=False)
    assert (facts.loss, facts.grad_norm, facts.stop) == (68 / 64, 0.5, False)
    assert facts.batch_digest == f"{int(batch_digest(rows([1, 2], [3, 4]))) % (1 << 64):016x}"


def test_a_stop_request_travels_with_the_reduction():
    """A rank that was asked to stop, or wants to save, says so in the collective of the loss."""
    meter = StepMeter(Ranks())
    meter.add(0, rows([1, 2]), torch.tensor(1.0))
    assert meter.reduce(1, num_targets=1, grad_norm=torch.tensor(0.0), stop=True).stop
    meter.add(0, rows([1, 2]), torch.tensor(1.0))
    facts = meter.reduce(1, num_targets=1, grad_norm=torch.tensor(0.0), stop=False, save=True)
    assert (facts.stop, facts.save) == (False, True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_names_step_rank_and_samples(value):
    """The second micro-batch, samples 34-35 on rank 0, is named; the first is not."""
    meter = StepMeter(Ranks())
    meter.add(32, rows([1, 2], [3, 4]), torch.tensor(1.0))
    meter.add(34, rows([1, 2], [3, 4]), torch.tensor(value))
    with pytest.raises(NumericsError) as caught:
        meter.reduce(9, num_targets=4, grad_norm=torch.tensor(1.0), stop=False)
    error = caught.value
    assert f"loss {value} on rank 0, samples 34-35" in error.found and "32" not in error.found
    assert error.where == "step 9" and "finite" in error.expected and "launch again" in error.action
    assert error.exit_code == 5


def test_a_gradient_is_not_blamed_for_a_loss():
    """With an infinite loss the gradient norm, which follows from it, is not named."""
    meter = StepMeter(Ranks())
    meter.add(0, rows([1, 2]), torch.tensor(1.0))
    meter.add(1, rows([1, 2]), torch.tensor(float("inf")))
    with pytest.raises(NumericsError) as caught:
        meter.reduce(1, num_targets=2, grad_norm=torch.tensor(float("nan")), stop=False)
    assert caught.value.found == "loss inf on rank 0, samples 1-1"


def test_a_gradient_norm_that_is_not_finite_is_refused():
    """A finite loss does not excuse an infinite gradient (case E07)."""
    meter = StepMeter(Ranks())
    meter.add(0, rows([1, 2]), torch.tensor(1.0))
    with pytest.raises(NumericsError, match="gradient norm inf on rank 0, samples 0-0"):
        meter.reduce(1, num_targets=1, grad_norm=torch.tensor(float("inf")), stop=False)


def test_a_meter_may_leave_the_judgement_to_others():
    """With refuse=False a loss that is not finite is a fact like others."""
    meter = StepMeter(Ranks(), refuse=False)
    meter.add(0, rows([1, 2]), torch.tensor(float("nan")))
    facts = meter.reduce(1, num_targets=2, grad_norm=torch.tensor(0.5), stop=False)
    assert facts.loss != facts.loss
    assert facts.grad_norm == 0.5


def test_digest_of_segments_covers_them_and_leaves_padding_out():
    """Padding on either side, as long as it likes, changes nothing; another cut of a row does."""

    def segmented(ids, positions, segments):
        return {**rows(ids), "position_ids": torch.tensor([positions]),
                "segment_ids": torch.tensor([segments])}  # fmt: skip

    base = hexdigest(segmented([1, 2, 3], [0, 1, 0], [0, 0, 1]))
    assert base == hexdigest(segmented([1, 2, 3, 9], [0, 1, 0, 0], [0, 0, 1, -1]))
    assert base == hexdigest(segmented([9, 9, 1, 2, 3], [0, 0, 0, 1, 0], [-1, -1, 0, 0, 1]))
    assert base != hexdigest(segmented([1, 2, 3], [0, 0, 1], [0, 1, 1]))
    assert base != hexdigest(segmented([1, 2, 3], [0, 1, 2], [0, 0, 0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_that_was_summed_in_16_bit_is_refused(dtype):
    """Sabotage: a recipe that forgot `.float()`; nothing of the micro-batch is kept."""
    meter = StepMeter(Ranks())
    with pytest.raises(ConfigError) as caught:
        meter.add(0, rows([1, 2]), torch.tensor(1.0, dtype=dtype))
    error = caught.value
    assert error.found == f"a loss in {str(dtype).removeprefix('torch.')}"
    assert error.where == "compute_loss" and "logits.float()" in error.action
    meter.add(0, rows([1, 2]), torch.tensor(2.0))
    assert meter.reduce(1, num_targets=2, grad_norm=0.5, stop=False).loss == 1.0
