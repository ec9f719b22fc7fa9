# SPDX-License-Identifier: Apache-2.0
"""Names and parts of a model's tensors, whatever is around it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from mprecipes.checkpoint.modules import (
    clean,
    is_deepspeed,
    is_sharded,
    local_parts,
    unwrap,
    weights_of,
)
from mprecipes.errors import ConfigError
from tests.toys import toy


@pytest.fixture(params=[0, 1, 2])
def mesh(request):
    """This process as one of three, of which the others are not there."""
    dist.init_process_group("fake", rank=request.param, world_size=3, store=FakeStore())
    yield init_device_mesh("cpu", (3,))
    dist.destroy_process_group()


def test_wrappers_of_parts_add_nothing_to_a_name():
    """torch.compile and activation checkpointing of a layer leave its parameters' names."""
    name = "layers.0._orig_mod.mlp._checkpoint_wrapped_module.weight"
    assert clean(name) == "layers.0.mlp.weight"
    assert clean("my_orig_mod.weight") == "my_orig_mod.weight"


def test_tied_weights_are_given_once_and_a_plain_model_is_not_sharded():
    """The first name counts; nothing of DeepSpeed is imported to know."""
    model, _ = toy()
    assert sorted(weights_of(model)) == ["embed.weight", "empty", "idle", "mask", "narrow", "seen"]
    assert unwrap(model) is model and not is_deepspeed(model) and not is_sharded(model)


def test_a_shard_is_the_range_of_its_rows(mesh):
    """4 rows over 3 ranks: two, two and none; an element's index is that in the full tensor."""
    model = torch.nn.Linear(3, 4, bias=False)
    whole = model.weight.detach().clone()
    fully_shard(model, mesh=mesh)
    assert is_sharded(model)
    parts = dict(local_parts([("weights/weight", model.weight), ("n", torch.ones(2))]))
    assert parts.pop("n").tolist() == [1, 1]
    keys = [["weights/weight[0:6 of 4x3]"], ["weights/weight[6:12 of 4x3]"], []]
    assert list(parts) == keys[mesh.get_local_rank()]
    for part in parts.values():
        start = 6 * mesh.get_local_rank()
        assert torch.equal(part, whole.flatten()[start : start + 6])
        part.zero_()
        assert not model.weight.to_local().any()  # the same memory


def test_other_placements_are_refused(mesh):
    """What is not FSDP2 on one mesh dimension is named, not written wrongly."""
    tensor = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    with pytest.raises(ConfigError) as caught:
        dict(local_parts([("weights/x", tensor)]))
    assert "weights/x is placed as" in caught.value.found
