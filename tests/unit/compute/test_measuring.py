# SPDX-License-Identifier: Apache-2.0
"""Shares of what FP16, FP8 and BF16 would lose, at right values."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mprecipes.compute.culprits import parameter_parts
from mprecipes.compute.measuring import (
    StepMeasurement,
    activation_facts,
    embedding_parameters,
    layer_norms,
    sample,
    vanishing,
    vanishing_counts,
)
from mprecipes.compute.policy import NumericsPolicy
from tests.toy_model import tiny_llama


def test_an_update_below_half_an_ulp_vanishes():
    """1 + 2^-9 lands in FP16 and not in BF16; 1 + 1e-6 in FP32 alone; 1 + 2^-7 in both."""
    ones = torch.ones(3)
    after = ones + torch.tensor([2**-9, 1e-6, 2**-7])
    found = vanishing(vanishing_counts(ones, after, ones.bool()))
    assert found["precision/vanishing_updates_bf16"] == pytest.approx(2 / 3)
    assert found["precision/vanishing_updates_fp16"] == pytest.approx(1 / 3)
    assert found["precision/vanishing_updates_masters"] == 0.0


def test_the_shares_are_what_casting_shows():
    """Against the casts themselves, for random weights and updates of every size."""
    generator = torch.Generator().manual_seed(1)
    before = torch.randn(5000, generator=generator).bfloat16().float()
    update = 2.0 ** torch.randint(-20, 0, (5000,), generator=generator)
    graded = torch.ones(5000, dtype=torch.bool)
    found = vanishing(vanishing_counts(before, before + update, graded))
    stays = ((before + update).bfloat16().float() == before).float().mean().item()
    assert found["precision/vanishing_updates_bf16"] == pytest.approx(stays, abs=0.03)


@pytest.mark.parametrize(
    ("update", "bf16", "fp16"),
    [(1e-4, 0, 0), (2.0**-24, 0, 0), (1.5 * 2.0**-25, 0, 0), (2.0**-26, 0, 1), (1e-12, 0, 1),
     (1.5 * 2.0**-134, 0, 1), (2.0**-135, 1, 1), (2.0**-149, 1, 1)],
)  # fmt: skip
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_weight_of_zero_takes_what_the_format_can_hold(zero, update, bf16, fp16):
    """Only what is below half its smallest subnormal vanishes, as the cast shows; masters hold all.

    Smallest subnormals are 2^-24 in FP16, 2^-133 in BF16 and 2^-149 in FP32.
    """
    before, after = torch.tensor([zero]), torch.tensor([update])
    found = vanishing(vanishing_counts(before, after, torch.tensor([True])))
    assert found == {
        "precision/vanishing_updates_bf16": bf16,
        "precision/vanishing_updates_fp16": fp16,
        "precision/vanishing_updates_masters": 0.0,
    }
    assert [(after.to(dtype) == 0).item() for dtype in (torch.bfloat16, torch.float16)] == [
        bool(bf16), bool(fp16),
    ]  # fmt: skip


def test_a_weight_of_zero_that_stays_is_lost_by_the_masters():
    """It had a gradient and did not move; nothing vanishes in 16 bit, as no update was made."""
    assert vanishing_counts(torch.zeros(2), torch.zeros(2), torch.tensor([True, False])) == [
        0, 0, 0, 1, 1,
    ]  # fmt: skip


def test_masters_lose_what_their_own_ulp_hides():
    """A weight of 1.0 with a gradient and no change is counted for the masters."""
    found = vanishing(vanishing_counts(torch.ones(2), torch.ones(2), torch.tensor([True, False])))
    assert found["precision/vanishing_updates_masters"] == 1.0


def measured(gradient, scale=1.0, ranks=None):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.tensor(gradient)
    parts = partial(parameter_parts, {"w": weight})
    made = StepMeasurement(parts, scale, NumericsPolicy(), (), ranks)
    return weight, made


def test_gradients_below_the_smallest_number_are_counted():
    """Of four, 2^-25 and zero are lost in FP16; FP8 loses what is 2^-18.8 below the largest."""
    weight, made = measured([[2.0**-25, 0.0], [2.0**-23, 1.0]])
    made.before_update()
    with torch.no_grad():
        weight.add_(0.5)
    found = made.result()
    assert found["precision/gradient_underflow_fp16"] == 0.5
    assert found["precision/gradient_underflow_fp8"] == 0.75
    assert found["precision/vanishing_updates_bf16"] == 0.0


def test_a_larger_scale_saves_small_gradients():
    """The same gradients times 4: 2^-25 becomes 2^-23, which FP16 holds."""
    _, made = measured([[4 * 2.0**-25, 0.0], [4 * 2.0**-23, 4.0]], scale=4.0)
    assert made.result()["precision/gradient_underflow_fp16"] == 0.25


def test_the_parts_of_a_sharded_model_are_one_sample():
    """Rank 1's part of 6 elements has 1 of 6 lost in FP16: with 2 of 4 here 3 of 10; none moved."""
    other = [1.0, 0.0, 6.0, 0.0, 0.0, 4.0, 0.0, 6.0]
    ranks = SimpleNamespace(sum=lambda mine: [a + b for a, b in zip(mine, other, strict=True)])
    weight, made = measured([[2.0**-25, 0.0], [2.0**-23, 1.0]], ranks=ranks)
    made.before_update()
    with torch.no_grad():
        weight[1, 1] += 2.0**-9
    found = made.result()
    assert found["precision/gradient_underflow_fp16"] == 0.3
    assert found["precision/gradient_underflow_fp8"] == 0.3
    assert found["precision/vanishing_updates_bf16"] == 1 / 5
    assert found["precision/vanishing_updates_masters"] == 2 / 9


def test_activations_are_told_as_fp16_would_hold_them():
    """Of 1, 2^-15, 2^-26 and 0 three are not zero: one is subnormal and one is lost."""
    facts = activation_facts(torch.tensor([1.0, 2.0**-15, 2.0**-26, 0.0]), whole=True)
    assert [facts.amax.item(), facts.subnormal.item(), facts.underflow.item()] == pytest.approx(
        [1.0, 1 / 3, 1 / 3]
    )


def test_norms_are_summed_by_layer_and_unscaled():
    """3 and 4 in one block make 5; what lies outside is under its module; scale 2 halves."""
    norms = {"m.0.a.weight": 6.0, "m.0.b.weight": 8.0, "head.weight": 2.0}
    assert layer_norms(norms, ["m.0"], 2.0) == {
        "precision/layer_grad_norm/m.0": 5.0, "precision/layer_grad_norm/head": 1.0,
    }  # fmt: skip


def test_a_sample_is_small_and_a_copy():
    """At most 4096 elements of a million, at equal distances, in FP32."""
    values = torch.arange(1_000_000, dtype=torch.float64)
    taken = sample(values)
    assert len(taken) == 4096 and taken.dtype == torch.float32
    assert taken[1].item() == 1_000_000 // 4096
    assert embedding_parameters(tiny_llama()) == {"model.embed_tokens.weight"}
