# SPDX-License-Identifier: Apache-2.0
"""The probe: what it measures, and that a training does not notice it."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mprecipes as mp
from mprecipes.compute.ranks import BatchPlan, Ranks
from mprecipes.resume.probe import Part, cosine, matmul_bits, sketch_gradient

ROWS, LENGTH, VOCABULARY = 32, 6, 16


class Rows(torch.utils.data.Dataset):
    """Rows of tokens that are a function of their number."""

    is_deterministic = True

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        ids = (torch.arange(LENGTH) * (index + 1) + index) % VOCABULARY
        return {"input_ids": ids, "labels": ids.clone()}

    def num_targets(self, rows):
        return len(rows) * (LENGTH - 1)


class Model(torch.nn.Module):
    """Draws dropout masks, and counts its forwards in a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 8)
        self.drop = torch.nn.Dropout(0.3)
        self.head = torch.nn.Linear(8, VOCABULARY)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, ids):
        self.forwards += 1
        return self.head(self.drop(self.embed(ids)))


def compute_loss(model, batch):
    logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")


class Accelerator:
    scaler = None

    @staticmethod
    def backward(loss):
        loss.backward()


def launch(plan=BatchPlan(4, 1, 1, 0), ranks=Ranks()):  # noqa: B008
    return SimpleNamespace(
        accelerator=Accelerator(), ranks=ranks, plan=plan, device=torch.device("cpu")
    )


@pytest.fixture
def state():
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


ORDER = mp.SampleOrder(ROWS, 3)


def measure(state, first=8, stored=None, on=None, **arguments):
    """What a recipe does after the step whose samples begin at `first`."""
    model, optimizer = state
    on = on or launch()
    position = mp.Position(samples_seen=first + on.plan.global_batch)
    probe = mp.Probe(on, Rows(), ORDER, position, stored, **arguments)
    with probe.measuring(model):
        for batch in probe.batches():
            mp.seed_micro_batch(1, batch.first_sample)
            loss = compute_loss(model, batch.tensors)
            probe.add(loss)
            probe._launch.accelerator.backward(loss * probe.scale)
        probed = probe.result(model)
    optimizer.zero_grad()
    assert isinstance(probed, mp.Probed)
    return probed


def train(state, steps, with_probes):
    """Trains with draws of its own between the steps; gives weights and the next numbers."""
    model, optimizer = state
    for step in range(steps):
        if with_probes:
            measure(state, 4 * step)
        mp.seed_micro_batch(1, step)
        ids = torch.randint(0, VOCABULARY, (4, LENGTH))
        compute_loss(model, {"input_ids": ids, "labels": ids}).backward()
        optimizer.step()
        optimizer.zero_grad()
        random.random(), np.random.random()
    return model.state_dict(), (random.random(), np.random.random(), torch.rand(1).item())


def test_a_training_does_not_notice_the_probe(state):
    """Weights, buffers and all random streams are bit-equal with a probe a step and without."""
    found = []
    for with_probes in (False, True):
        mp.seed_everything(5)
        torch.manual_seed(0)
        model = Model()
        one = (model, torch.optim.AdamW(model.parameters(), lr=0.1))
        mp.seed_everything(6)
        found.append(train(one, 4, with_probes))
    (weights, numbers), (others, other_numbers) = found
    assert numbers == other_numbers
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert weights["forwards"].item() == 4


def test_the_same_state_gives_the_same_facts(state):
    """Bit by bit; only the time differs. It is the batch of the step before the position."""
    first, again = measure(state).facts, measure(state).facts
    first.pop("forward_seconds"), again.pop("forward_seconds")
    assert first == again
    assert (first["first_sample"], first["micro_batch"], first["num_micro_batches"]) == (8, 4, 1)
    assert first["targets"] == 20
    assert 2.0 < float.fromhex(first["loss"]) < 4.0
    assert len(first["sketch"]) == 64


@pytest.mark.parametrize("part", ["weight", "dropout", "batch"])
def test_what_changed_shows(state, part):
    """One unit in the last place of a weight that counts, no dropout, other rows."""
    weight = state[0].head.bias.detach()
    weight[0] = 1.0  # as large as what it is added to: its last place is not rounded away
    before = measure(state).facts
    if part == "weight":
        weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
    elif part == "dropout":
        state[0].drop.p = 0.0
    after = measure(state, 9 if part == "batch" else 8).facts
    assert before["grad_digest"] != after["grad_digest"]
    assert (before["batch_digest"] != after["batch_digest"]) is (part == "batch")
    assert part == "weight" or before["loss"] != after["loss"]


def test_a_stored_probe_is_made_again_at_another_position(state):
    """The manifest says which batch it was."""
    stored = measure(state, 8).facts
    again = measure(state, 20, stored=stored).facts
    assert again["batch_digest"] == stored["batch_digest"]
    assert again["loss"] == stored["loss"]


def test_a_range_that_a_rollback_took_out_is_not_probed(state):
    """Samples 4 to 7 were left out: the step that ends at position 8 was samples 8 to 11."""
    position = mp.Position(samples_seen=8, skipped=((4, 8),))
    probe = mp.Probe(launch(), Rows(), ORDER, position)
    (batch,) = probe.batches()
    assert batch.rows == ORDER(8, 4).tolist()


def test_two_micro_batches_on_one_process_are_those_of_two(state):
    """Saved by two ranks, repeated by one: the mean loss of both, over all targets."""
    stored = {"first_sample": 8, "micro_batch": 4, "num_micro_batches": 2}
    both = measure(state, 8, stored=stored).facts
    parts = [float.fromhex(measure(state, first).facts["loss"]) for first in (8, 12)]
    assert float.fromhex(both["loss"]) == pytest.approx(sum(parts) / 2)
    assert both["targets"] == 40


def test_a_rank_without_a_micro_batch_takes_part_without_targets(state):
    """Saved by one, repeated by two: rank 1 computes, and adds nothing."""

    class Second(Ranks):
        def gather(self, value):
            return [value, value]

    on = launch(BatchPlan(4, 1, 2, 1), Second(1, 2))
    stored = {"first_sample": 8, "micro_batch": 4, "num_micro_batches": 1}
    facts = measure(state, 8, stored=stored, on=on).facts
    assert facts["batch_digest"] == f"{0:016x}"
    assert float.fromhex(facts["grad_norm"]) == 0.0


def test_parts_of_a_gradient_add_up():
    """A sharded gradient has the norm, the sketch and so the cosine of the whole."""
    torch.manual_seed(1)
    whole = torch.randn(1000)
    squares, sketch = sketch_gradient([Part("w", whole)])
    parts = [sketch_gradient([Part("w", whole[a:b], a)]) for a, b in ((0, 130), (130, 1000))]
    assert sum(each[0] for each in parts) == pytest.approx(squares)
    assert [a + b for a, b in zip(parts[0][1], parts[1][1])] == pytest.approx(sketch, abs=1e-4)


def test_sharded_gradients_are_summed_over_ranks(state):
    """Two ranks that hold a half each: the facts are those of the whole."""
    whole = measure(state).facts

    def half(which):
        def gradients(model):
            for name, parameter in model.named_parameters():
                flat = parameter.grad.reshape(-1)
                middle = len(flat) // 2
                yield (
                    Part(name, flat[:middle], 0)
                    if which == 0
                    else Part(name, flat[middle:], middle)
                )

        return gradients

    gathered = []

    class Both(Ranks):
        def gather(self, value):
            gathered.append(value)
            return list(gathered)

    for which in (0, 1):
        on = launch(ranks=Both())
        facts = measure(state, on=on, gradients=half(which), is_whole=False).facts
    assert facts["grad_digest"] == whole["grad_digest"]
    assert float.fromhex(facts["grad_norm"]) == pytest.approx(float.fromhex(whole["grad_norm"]))
    assert cosine(facts["sketch"], whole["sketch"]) == pytest.approx(1.0)


def test_the_cosine_of_sketches_is_near_that_of_the_gradients():
    """10 % of noise makes 1 - cosine about 0.005."""
    torch.manual_seed(2)
    whole = torch.randn(20_000)
    noisy = whole + 0.1 * torch.randn(20_000)
    found = cosine(*(sketch_gradient([Part("w", each)])[1] for each in (whole, noisy)))
    assert 0.002 < 1.0 - found < 0.010
    assert cosine([0.0], [1.0]) == 0.0


def test_a_lowered_matmul_precision_is_measured():
    """FP32 keeps 23 bits; what the setting gives here is measured, not read."""
    assert matmul_bits(torch.device("cpu")) == 23
    torch.set_float32_matmul_precision("medium")
    try:
        assert matmul_bits(torch.device("cpu")) in (7, 23)  # 7 where the processor has BF16
    finally:
        torch.set_float32_matmul_precision("highest")
