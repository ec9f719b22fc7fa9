# SPDX-License-Identifier: Apache-2.0
"""The cause of a bad verdict is what, done in FP32, makes the gradients right again."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.precision import MODES
from mprecipes.compute.ranks import Ranks
from mprecipes.data.reading import read_data
from mprecipes.tools.probe import Prober, load_recipe
from mprecipes.tools.probe_causes import WideSums, find_cause, round_as_reduced
from tests.fix64 import MODEL, RECIPE, write_rows


def make_prober(folder, loss_factor=1.0):
    """FIX-64 in FP32, ready to be compared with."""
    recipe, rows = load_recipe(RECIPE), write_rows(folder / "rows.jsonl")
    compute_loss = recipe.compute_loss
    recipe.compute_loss = lambda model, batch: compute_loss(model, batch) * loss_factor
    config = recipe.Config(
        output_dir="x", dataset=str(rows), seq_length=16, eval_fraction=None, model_config=MODEL,
        per_device_train_batch_size=4, max_steps=4, warmup_steps=1, learning_rate=1e-3,
    )  # fmt: skip
    data = read_data(config, Ranks(), should_stop=lambda: False).train
    made = Prober(recipe, config, data, steps=4, device=torch.device("cpu"))
    assert made.reference().passed
    return made


@pytest.fixture(scope="module")
def prober(tmp_path_factory):
    return make_prober(tmp_path_factory.mktemp("rows"))


class NarrowSums(TorchDispatchMode):
    """A device whose 16-bit products lose most of what they add up."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm") and args[-1].dtype == torch.bfloat16:
            return result - result.roll(1, -1)
        return result


def test_sums_inside_products_are_found(prober):
    """Sabotage: a device that adds up badly in BF16; with FP32 accumulation the mode is right."""
    with NarrowSums():
        found = prober.probe(MODES["bf16"], NumericsPolicy())
    assert not found.passed
    assert found.cause.startswith("accumulation inside products in FP32 helps: worst cosine")
    assert float(found.cause.rpartition(" ")[2]) > 0.99


def test_a_small_loss_scale_is_found(prober):
    """At scale 2^-14 two thirds of FP16's gradients underflow: 256 times that helps."""
    found = prober.probe(MODES["fp16"], NumericsPolicy(loss_scale=2.0**-14))
    assert not found.passed and found.gradient_underflow > 0.5
    assert found.cause.startswith("loss scale 0.015625 helps: worst cosine")


def test_sums_over_processes_are_found(tmp_path):
    """Gradients of a loss that is 2^-18 times as large are zero in reduce_dtype fp16."""
    tiny = make_prober(tmp_path, loss_factor=2.0**-18)
    found = tiny.probe(MODES["bf16"], NumericsPolicy(reduce_dtype="fp16"))
    assert not found.passed
    assert found.cause.startswith("reduce_dtype fp32 helps: worst cosine")


def test_products_add_up_in_fp32_and_keep_their_dtype():
    """512 ones and 2^-3: in BF16 steps of 256 the small ones would be lost."""
    x = torch.randn(4, 512).bfloat16()
    with WideSums():
        found = x @ x.T
        assert (x.float() @ x.float().T).dtype == torch.float32
    assert torch.equal(found, (x.float() @ x.float().T).bfloat16())


def test_nothing_that_helps_is_said_so():
    """The worst cosine stays: none of them helped; only what exists is tried."""
    tried = []

    def compare(policy, context):
        tried.append(policy)
        return 0.5

    policy = NumericsPolicy(reduce_dtype="bf16")
    words = find_cause(compare, ["model.layers.0.mlp"], MODES["bf16"], policy, 0.5)
    assert words == "none of them helped" and len(tried) == 3
    assert [p.reduce_dtype for p in tried] == ["bf16", "bf16", "fp32"]


def test_a_gradient_is_rounded_as_its_reduction():
    """1 + 2^-9 stays in FP16 and becomes 1 in BF16; FP32 changes nothing."""
    value = torch.tensor([1 + 2**-9 + 2**-12])
    for name, right in (("fp32", value.item()), ("fp16", 1 + 2**-9), ("bf16", 1.0)):
        found = round_as_reduced(value, NumericsPolicy(reduce_dtype=name))
        assert (found.item(), found.dtype) == (right, torch.float32)
