# SPDX-License-Identifier: Apache-2.0
"""A model is made to compute in its launch's mode, and looked at again after `prepare`."""

import copy
from types import SimpleNamespace

import pytest
import torch

from mprecipes.compute.conversion import check_conversion, compare_initial_weights, convert_model
from mprecipes.compute.digest import sum_digest
from mprecipes.compute.engines import ENGINES
from mprecipes.compute.kept import KeptInFp32
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.precision import MODES
from mprecipes.compute.ranks import Ranks
from mprecipes.compute.validation import subject, write_record
from mprecipes.errors import ConfigError
from tests.toy_model import tiny_llama

RECIPE = SimpleNamespace(name="r", version="1.0.0")


def started(mode, folder=None, engine="ddp", **policy):
    return SimpleNamespace(
        is_main=True, ranks=Ranks(), device=torch.device("cpu"), precision=MODES[mode],
        kept=KeptInFp32(), engine=ENGINES[engine],
        policy=NumericsPolicy(**policy), measured={"precision": {"mode": mode}},
        recipe_folder=folder,
    )  # fmt: skip


def test_fp8_needs_a_record_or_the_flag(tmp_path, caplog):
    """Refused without one; with one its digest is in the facts; with the flag that it is absent."""
    launch = started("fp8", tmp_path)
    with pytest.raises(ConfigError, match="not validated"):
        convert_model(launch, tiny_llama(), RECIPE)
    about = subject(
        tiny_llama().config.to_dict(), recipe="r", version="1.0.0", fp8_recipe="rowwise"
    )
    write_record(tmp_path, about, {"passed": True, "reason": "as good"})
    convert_model(launch, tiny_llama(), RECIPE)
    facts = launch.measured["precision"]["fp8"]
    assert len(facts["validation"]) == 16 and len(facts["converted"]) == 14
    assert facts["skipped"]["lm_head"] == "output head"
    free = started("fp8")
    convert_model(free, tiny_llama(), RECIPE)
    assert free.measured["precision"]["fp8"]["validation"] is None
    assert "NOT VALIDATED" in caplog.text and "model.layers.0.mlp.up_proj" in caplog.text


def test_other_modes_leave_every_module_as_it_is():
    """bf16 converts nothing; modules to keep are named in the facts."""
    launch, model = started("bf16", keep_in_fp32=("lm_head",)), tiny_llama()
    kinds = [type(module) for module in model.modules()]
    convert_model(launch, model, RECIPE)
    assert [type(module) for module in model.modules()] == kinds
    assert launch.kept.names == launch.measured["precision"]["kept_in_fp32"] == ["lm_head"]


def test_a_conversion_that_was_lost_is_refused():
    """Sabotage: an FP8 launch whose prepared model has no FP8 module, or was never converted."""
    launch, model = started("fp8"), tiny_llama()
    with pytest.raises(ConfigError, match="0 modules compute in FP8"):
        check_conversion(launch.measured, model)
    convert_model(launch, model, RECIPE)
    check_conversion(launch.measured, model)
    with pytest.raises(ConfigError) as caught:
        check_conversion(launch.measured, tiny_llama())
    assert caught.value.expected == "14, as converted"
    assert caught.value.where == "precision fp8" and "launch.convert" in caught.value.action


class TwoRanks:
    """Rank 0, and a rank 1 that has built `other`."""

    world_size = 2

    def __init__(self, other):
        self._tensors = dict((*other.named_parameters(), *other.named_buffers()))

    def gather(self, value):
        if isinstance(value, int):
            return [value, sum_digest((each, name, 0) for name, each in self._tensors.items())]
        own = {name: sum_digest([(each, name, 0)]) for name, each in self._tensors.items()}
        return [value, own]


def test_ranks_that_built_the_same_model_go_on():
    """Equal weights on both, and one process alone, are no error."""
    model = tiny_llama()
    compare_initial_weights(TwoRanks(copy.deepcopy(model)), model)
    compare_initial_weights(Ranks(), model)


@pytest.mark.parametrize("bit", [0, 31])
def test_another_weight_on_one_rank_is_refused_by_name(bit):
    """One flipped bit of one weight of rank 1: both rank and tensor are named."""
    model = tiny_llama()
    other = copy.deepcopy(model)
    bits = other.model.norm.weight.data.view(torch.int32)
    bits[3] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
    with pytest.raises(ConfigError) as caught:
        compare_initial_weights(TwoRanks(other), model)
    assert caught.value.found == (
        "initial weights differ from rank 0's: rank 1 in model.norm.weight"
    )
    assert caught.value.where == "build_model"


def test_another_model_on_one_rank_is_refused():
    """What one rank lacks differs; the first tensors are listed and the others counted."""
    other = tiny_llama()
    other.extra = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)])
    with pytest.raises(ConfigError) as caught:
        compare_initial_weights(TwoRanks(other), tiny_llama())
    assert caught.value.found == (
        "initial weights differ from rank 0's: rank 1 in extra.0.weight, extra.0.bias, "
        "extra.1.weight, extra.1.bias, extra.2.weight and 1 more"
    )


def test_an_engine_with_copies_of_its_own_runs_under_autocast():
    """ZeRO in bf16: what is 16 bit in and outside of autocast is a product; in fp32 it is bare."""
    for mode, found in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        model = torch.nn.Linear(8, 8)
        convert_model(started(mode, engine="zero2"), model, RECIPE)
        assert model(torch.ones(1, 8)).dtype == found
