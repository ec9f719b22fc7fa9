# SPDX-License-Identifier: Apache-2.0
"""The training state as named tensors, its copies, its digests and its way back."""

import itertools

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from mprecipes.checkpoint.snapshot import (
    HostBuffers,
    describe_parameters,
    live_tensors,
    not_finite,
    take_snapshot,
    unwrap,
)
from mprecipes.checkpoint.snapshot import restore_in_place as restore
from mprecipes.checkpoint.storage import files_of
from mprecipes.errors import ConfigError, VerificationError
from tests.toys import toy, train_step

WEIGHTS = ["embed.weight", "empty", "idle", "mask", "narrow", "seen"]
UPDATED = ["embed.weight", "empty", "narrow"]


@pytest.fixture
def trained():
    model, optimizer = toy()
    for step in (1, 2):
        train_step(model, optimizer, step)
    return model, optimizer


def restore_in_place(model, optimizer, saved):
    """Fills from tensors in memory."""

    def fill(into):
        assert into.keys() == saved.keys()
        for name, tensor in into.items():
            tensor.copy_(saved[name])

    restore(model, optimizer, {name: tensor.to("meta") for name, tensor in saved.items()}, fill)


def snapshot_of(model, optimizer):
    return take_snapshot(live_tensors(model, optimizer))


def same_bits(one, other):
    assert one.keys() == other.keys()
    return all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def test_names_of_a_fresh_state():
    """Parameters and persistent buffers, tied ones once; a fresh optimizer has no state."""
    assert sorted(live_tensors(*toy())) == [f"weights/{name}" for name in WEIGHTS]


def test_names_of_a_trained_state(trained):
    """A parameter that was updated has moments and step; one without gradient has none."""
    names = sorted(name for name in live_tensors(*trained) if name.startswith("optimizer/"))
    assert names == [
        f"optimizer/{name}/{key}" for name in UPDATED for key in ("exp_avg", "exp_avg_sq", "step")
    ]


def test_live_tensors_are_the_live_ones(trained):
    """They share memory with the model, and looking creates no optimizer state."""
    model, optimizer = trained
    live = live_tensors(model, optimizer)
    assert live["weights/narrow"].data_ptr() == model.narrow.data_ptr()
    assert model.idle not in optimizer.state


def test_a_snapshot_shares_nothing_with_the_live_state(trained):
    """Training on changes the live state and not the copies; the copies hold every bit."""
    model, optimizer = trained
    live = live_tensors(model, optimizer)
    copies = take_snapshot(live)
    assert same_bits(copies, live)
    pointers = {tensor.data_ptr() for tensor in live.values() if tensor.numel()}
    assert not pointers & {tensor.data_ptr() for tensor in copies.values() if tensor.numel()}
    train_step(model, optimizer, 3)
    assert not torch.equal(copies["weights/narrow"], live["weights/narrow"])


def test_buffers_are_reused_while_the_state_has_its_shape(trained):
    """A second copy goes into the memory of the first; another shape takes new memory."""
    live = live_tensors(*trained)
    buffers = HostBuffers()
    buffers.reserve(live)
    first = buffers.copy(live)
    train_step(*trained, 3)
    second = buffers.copy(live)
    assert same_bits(second, live)
    assert all(second[name].data_ptr() == first[name].data_ptr() for name in live)
    live["weights/mask"] = torch.zeros(9)
    assert same_bits(buffers.copy(live), live)


def test_copies_lie_as_they_are_written(trained):
    """Wide elements first, one after the other, so that a file is one piece of memory."""
    copies = take_snapshot(live_tensors(*trained))
    (names,) = files_of(copies)
    assert [copies[name].itemsize for name in names] == sorted(
        (tensor.itemsize for tensor in copies.values()), reverse=True
    )
    filled = [copies[name] for name in names if copies[name].numel()]
    for one, other in itertools.pairwise(filled):
        assert one.data_ptr() + one.nbytes == other.data_ptr()


def test_description_of_the_weights(trained):
    """Names carry dtype and shape, of weights only."""
    described = describe_parameters(live_tensors(*trained))
    assert described["params"] == {
        "embed.weight": "float32",
        "narrow": "bfloat16",
        "empty": "float32",
        "idle": "float32",
        "seen": "int64",
        "mask": "bool",
    }
    assert described["shapes"]["embed.weight"] == [8, 4]
    assert described["shapes"]["empty"] == [0, 4]
    assert described["shapes"]["seen"] == []


def test_wrappers_change_no_name(trained):
    """torch.compile around the model or around a part of it leaves the names as they were."""
    model, optimizer = trained
    plain = live_tensors(model, optimizer)
    compiled = torch.compile(model)
    assert unwrap(compiled) is model
    assert live_tensors(compiled, optimizer).keys() == plain.keys()
    model.embed.compile()
    model.head = torch.compile(model.head)
    assert live_tensors(model, optimizer).keys() == plain.keys()


def test_accelerate_wrappers_change_nothing(trained):
    """What `Accelerator.prepare` returns is saved and restored like what it was given."""
    model, optimizer = trained
    saved = snapshot_of(model, optimizer)
    try:
        accelerator = Accelerator(cpu=True)
        other = toy(seed=5)
        prepared = accelerator.prepare(*other)
        restore_in_place(*prepared, saved)
        assert same_bits(snapshot_of(*prepared), saved)
        assert same_bits(snapshot_of(*other), saved)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def test_state_that_is_no_tensor_is_refused(trained):
    """An optimizer with a Python number in its state is named, not silently cut."""
    model, optimizer = trained
    optimizer.state[model.narrow]["step"] = 3
    with pytest.raises(ConfigError) as caught:
        live_tensors(model, optimizer)
    assert caught.value.found == "optimizer state 'step' of narrow is a int"
    assert "by name" in caught.value.expected
    assert caught.value.where == "the state to checkpoint"
    assert "whose state is tensors" in caught.value.action


def test_a_parameter_the_model_does_not_have_is_refused():
    """An optimizer built on another model cannot be saved by name."""
    with pytest.raises(ConfigError, match=r"updates a bfloat16 \[3\] the model does not have"):
        live_tensors(toy()[0], toy(seed=1)[1])


def test_restoring_gives_every_bit_back(trained):
    """A fresh model and optimizer continue exactly like the ones that were saved."""
    saved = snapshot_of(*trained)
    other = toy(seed=9)
    restore_in_place(*other, saved)
    assert other[0].head.weight is other[0].embed.weight
    assert same_bits(snapshot_of(*other), saved)
    for model, optimizer in (trained, other):
        train_step(model, optimizer, 3)
    assert same_bits(snapshot_of(*trained), snapshot_of(*other))


def test_restoring_the_very_beginning_forgets_what_was_learnt(trained):
    """A state without optimizer tensors leaves none behind."""
    fresh = snapshot_of(*toy())
    restore_in_place(*trained, fresh)
    assert same_bits(snapshot_of(*trained), fresh)


def test_hyperparameters_stay_the_live_ones(trained):
    """The learning rate of the new launch governs, not one that was saved."""
    saved = snapshot_of(*trained)
    model, _ = toy()
    groups = [
        {"params": [model.narrow, model.idle], "lr": 0.5, "weight_decay": 0.0},
        {"params": [model.embed.weight, model.empty], "lr": 0.25},
    ]
    optimizer = torch.optim.AdamW(groups)
    restore_in_place(model, optimizer, saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert same_bits(snapshot_of(model, optimizer), saved)


def test_other_optimizers_come_back_too():
    """State by other names and of other dtypes than the parameter's is restored as it was."""
    model, _ = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_step(model, optimizer, 1)
    optimizer.state[model.narrow]["note"] = torch.tensor([1, 2])
    optimizer.state[model.empty]["note"] = torch.tensor([], dtype=torch.int64)
    optimizer.state[model.embed.weight]["note"] = torch.tensor([2**53 + 1])
    saved = snapshot_of(model, optimizer)
    other, _ = toy(seed=2)
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    restore_in_place(other, fresh, saved)
    assert same_bits(snapshot_of(other, fresh), saved)


def test_everything_that_does_not_fit_is_listed_and_nothing_is_changed(trained):
    """Missing, unexpected, wrong shape and wrong dtype are named in one message."""
    saved = snapshot_of(*trained)
    del saved["weights/idle"], saved["optimizer/narrow/exp_avg"]
    saved["weights/stranger"] = torch.zeros(1)
    saved["optimizer/narrow/stranger"] = torch.zeros(1)
    saved["optimizer/seen/step"] = torch.zeros(1)
    saved["weights/mask"] = torch.zeros(3)
    saved["optimizer/embed.weight/exp_avg"] = torch.zeros(4, 8)
    other = toy(seed=4)
    before = snapshot_of(*other)
    with pytest.raises(VerificationError) as caught:
        restore_in_place(*other, saved)
    assert caught.value.found.splitlines()[1:] == [
        "    optimizer/embed.weight/exp_avg: float32 [4, 8], the live one is float32 [8, 4]",
        "    optimizer/embed.weight/stranger: missing",
        "    optimizer/empty/stranger: missing",
        "    optimizer/narrow/exp_avg: missing",
        "    optimizer/seen/step: unexpected",
        "    weights/idle: missing",
        "    weights/mask: float32 [3], the live one is bool [3]",
        "    weights/stranger: unexpected",
    ]
    assert caught.value.expected == "the names, shapes and dtypes of the live model and optimizer"
    assert caught.value.where == "the tensors of the checkpoint"
    assert "nothing was restored" in caught.value.action
    assert same_bits(snapshot_of(*other), before)


def test_a_live_optimizer_state_decides_what_fits(trained):
    """A key or shape the running optimizer does not have is refused."""
    saved = snapshot_of(*trained)
    saved["optimizer/narrow/stranger"] = torch.zeros(1)
    saved["optimizer/narrow/step"] = torch.zeros(2)
    with pytest.raises(VerificationError) as caught:
        restore_in_place(*trained, saved)
    assert "optimizer/narrow/stranger: unexpected" in caught.value.found
    assert "optimizer/narrow/step: float32 [2], the live one is float32 []" in caught.value.found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_names_the_tensors(dtype, bad):
    """NaN and infinities are seen in every width; whole numbers and empty tensors pass."""
    tensors = {
        "good": torch.full((3,), 6e4, dtype=dtype),
        "bad": torch.tensor([0.0, bad], dtype=dtype),
        "whole": torch.tensor([2**63 - 1]),
        "empty": torch.zeros(0, dtype=dtype),
    }
    assert not_finite(tensors) == ["bad"]


def test_not_finite_lets_the_largest_numbers_pass():
    """A float64 that does not fit float32 is finite; a float8 NaN is not."""
    tensors = {
        "wide": torch.tensor([1e300], dtype=torch.float64),
        "tiny": torch.tensor([float("nan")]).to(torch.float8_e4m3fn),
    }
    assert not_finite(tensors) == ["tiny"]


def test_a_state_that_was_half_filled_is_useless(trained):
    """When filling fails every number it could have written is NaN, and the error comes through."""
    saved = snapshot_of(*trained)

    def fail(into):
        into["weights/idle"].copy_(saved["weights/idle"])
        raise KeyError

    for model, optimizer in (trained, toy(seed=3)):
        with pytest.raises(KeyError):
            restore(model, optimizer, saved, fail)
        for name, tensor in live_tensors(model, optimizer).items():
            assert not tensor.is_floating_point() or tensor.isnan().all(), name
    restore_in_place(*trained, saved)
    assert same_bits(snapshot_of(*trained), saved)


def test_a_running_state_is_filled_where_it_lies(trained):
    """No second copy of the optimizer state is made (memory after a resume)."""
    model, optimizer = trained
    saved = snapshot_of(model, optimizer)
    before = {name: tensor.data_ptr() for name, tensor in live_tensors(model, optimizer).items()}
    train_step(model, optimizer, 3)
    restore_in_place(model, optimizer, saved)
    after = {name: tensor.data_ptr() for name, tensor in live_tensors(model, optimizer).items()}
    assert after == before


def test_model_state_that_is_no_tensor_is_refused():
    """A module that puts something else into its state_dict is named."""

    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"anything": 1}

        def set_extra_state(self, state):
            pass

    model = Odd(1, 1)
    with pytest.raises(ConfigError, match="_extra_state of the model's state_dict is not"):
        live_tensors(model, torch.optim.SGD(model.parameters()))
