# SPDX-License-Identifier: Apache-2.0
"""ZeRO partitions as fragments, on stand-ins laid out as DeepSpeed lays them out.

The real engine is driven in `tests/engines`.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mprecipes.checkpoint import zero
from mprecipes.errors import ConfigError
from tests.toys import toy

HALF = 5  # elements of a partition; the two parameters have 6 and 3, one element is padding


class Engine(nn.Module):
    """Rank `rank` of two, stage 2: `weight` (2, 3) and `bias` (3) in one group, BF16 copies."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3).bfloat16())
        self.bias = nn.Parameter(torch.arange(6.0, 9.0).bfloat16())
        self.register_buffer("seen", torch.tensor(4))
        flat = torch.cat([torch.arange(9.0), torch.zeros(1)])[rank * HALF : (rank + 1) * HALF]
        self.flat = flat.clone().requires_grad_()
        for parameter, first in ((self.weight, 0), (self.bias, 6)):
            low = max(first, rank * HALF)
            high = min(first + parameter.numel(), (rank + 1) * HALF)
            parameter._hp_mapping = None
            if low < high:
                here = SimpleNamespace(start=low - rank * HALF, numel=high - low)
                there = SimpleNamespace(start=low - first, numel=high - low)
                parameter._hp_mapping = SimpleNamespace(
                    hp_fragment_address=here, lp_fragment_address=there
                )
        torch_optimizer = torch.optim.AdamW([self.flat])
        self.optimizer = SimpleNamespace(
            bit16_groups=[[self.weight, self.bias]],
            single_partition_of_fp32_groups=[self.flat],
            optimizer=torch_optimizer,
        )

    @property
    def module(self) -> nn.Module:
        return self

    def zero_optimization_stage(self) -> int:
        return 2


def trained(rank: int) -> Engine:
    engine = Engine(rank)
    engine.flat.grad = torch.ones(HALF)
    engine.optimizer.optimizer.step()
    return engine


def test_a_plain_model_has_no_engine():
    """Nothing of DeepSpeed is needed where it is not used."""
    assert zero.engine_of(toy()[0]) is None


def test_partitions_are_ranges_of_masters_and_moments():
    """Both ranks' parts are the FP32 parameters without the padding; the step is every rank's."""
    lives = [zero.live_tensors(trained(rank)) for rank in (0, 1)]
    assert sorted(lives[0]) == [
        "optimizer/bias/step",
        "optimizer/weight/exp_avg[0:5 of 2x3]",
        "optimizer/weight/exp_avg_sq[0:5 of 2x3]",
        "optimizer/weight/step",
        "weights/seen",
        "weights/weight[0:5 of 2x3]",
    ]
    assert "weights/bias[0:3 of 3]" in lives[1] and "weights/weight[5:6 of 2x3]" in lives[1]
    assert lives[1]["weights/weight[5:6 of 2x3]"].dtype == torch.float32
    assert lives[0]["optimizer/bias/step"].item() == 1.0


def test_all_weights_are_described_on_every_rank():
    """Full shapes and the masters' dtype, whichever part is here."""
    full = zero.full_weights(Engine(0))
    assert {name: (str(t.dtype), list(t.shape)) for name, t in full.items()} == {
        "weights/weight": ("torch.float32", [2, 3]),
        "weights/bias": ("torch.float32", [3]),
        "weights/seen": ("torch.int64", []),
    }


def stored(**changed):
    """What a checkpoint of any engine holds of this model after a step."""
    full = {f"weights/{name}": t for name, t in (("weight", (2, 3)), ("bias", (3,)))}
    full |= {f"optimizer/{n}/{k}": s for n, s in (("weight", (2, 3)), ("bias", (3,)))
             for k in ("exp_avg", "exp_avg_sq")}  # fmt: skip
    tensors = {name: torch.empty(shape, device="meta") for name, shape in full.items()}
    tensors |= {f"optimizer/{n}/step": torch.empty((), device="meta") for n in ("weight", "bias")}
    return tensors | {"weights/seen": torch.empty((), dtype=torch.int64, device="meta")} | changed


def test_a_fresh_optimizer_gets_room_for_what_is_stored():
    """Moments as long as the partition and a step counter, at zero until they are filled."""
    engine = Engine(1)
    assert zero.prepare_state(engine, stored()) == []
    state = engine.optimizer.optimizer.state[engine.flat]
    assert {key: list(value.shape) for key, value in state.items()} == {
        "exp_avg": [HALF],
        "exp_avg_sq": [HALF],
        "step": [],
    }
    assert zero.live_tensors(engine).keys() == zero.live_tensors(trained(1)).keys()


def test_state_that_is_there_is_filled_where_it_lies():
    """No second copy of the moments is made."""
    engine = trained(0)
    before = engine.optimizer.optimizer.state[engine.flat]["exp_avg"]
    assert zero.prepare_state(engine, stored()) == []
    assert engine.optimizer.optimizer.state[engine.flat]["exp_avg"] is before


def test_what_does_not_fit_is_listed():
    """A tensor too many, one too few, and another shape; nothing is prepared."""
    engine, wrong = Engine(0), stored(**{"weights/other": torch.zeros(1)})
    del wrong["optimizer/bias/exp_avg"]
    wrong["weights/bias"] = torch.zeros(4)
    assert sorted(zero.prepare_state(engine, wrong)) == [
        "optimizer/bias/exp_avg: missing",
        "weights/bias: float32 [4], the live one is float32 [3]",
        "weights/other: unexpected",
    ]
    assert not engine.optimizer.optimizer.state


def test_a_working_copy_that_is_not_the_cast_is_named():
    """One element of the copy that is not its master's cast is enough."""
    engine = Engine(0)
    assert zero.stale_working_copies(engine) == []
    with torch.no_grad():
        engine.weight.view(-1)[4] += 1
    assert zero.stale_working_copies(engine) == ["weight"]
    assert sorted(zero.working_copies(engine)) == [
        "working/bias",
        "working/seen",
        "working/weight",
    ]


def test_optimizer_state_that_is_no_tensor_is_refused():
    """A compiled optimizer that counts steps in a Python number cannot be restored by name."""
    engine = trained(0)
    engine.optimizer.optimizer.state[engine.flat]["step"] = 1
    with pytest.raises(ConfigError, match="'step' of weight is a int"):
        zero.live_tensors(engine)
