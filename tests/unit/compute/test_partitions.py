# SPDX-License-Identifier: Apache-2.0
"""Where a rank's parts lie in flat partitions; as fragments, tests/unit/checkpoint/test_zero.py."""

import math

import pytest
import torch

from mprecipes.compute.culprits import GradientNorms
from mprecipes.compute.partitions import gradient_parts, parts_of
from tests.unit.checkpoint.test_zero import Engine


def with_gradient(rank):
    """Rank `rank` of two: the gradient of `weight` is 0, 1, .. 5 and that of `bias` 6, 7, 8."""
    engine = Engine(rank)
    parts = [part for part in parts_of(engine) if part.count]
    first = {"weight": 0, "bias": 6}
    engine.optimizer.cpu_offload = False
    engine.optimizer.averaged_gradients = {
        0: [torch.arange(part.count) + float(first[part.name] + part.start) for part in parts]
    }
    return engine


class Both:
    """The ranks of a sum whose other half is known."""

    world_size = 2

    def __init__(self, other):
        self._other = other

    def sum(self, mine):
        return [a + b for a, b in zip(mine, self._other, strict=True)]


def test_parts_are_named_placed_and_without_padding():
    """Five elements of `weight` on rank 0; one, and `bias`, on rank 1, where one pads."""
    places = [
        [(part.name, part.offset, part.start, part.count) for part in parts_of(Engine(rank))]
        for rank in (0, 1)
    ]
    assert places[0] == [("weight", 0, 0, 5), ("bias", 0, 0, 0)]
    assert places[1] == [("weight", 0, 5, 1), ("bias", 1, 0, 3)]


def test_gradients_are_found_beside_their_masters():
    """Each rank gives what it updates: FP32 masters and the gradient of the same elements."""
    weight, bias = gradient_parts(with_gradient(1))
    assert (weight.name, weight.is_matrix, bias.name, bias.is_matrix) == (
        "weight", True, "bias", False,
    )  # fmt: skip
    assert weight.gradient.tolist() == [5.0] and bias.gradient.tolist() == [6.0, 7.0, 8.0]
    assert bias.weight.tolist() == [6.0, 7.0, 8.0] and bias.weight.dtype == torch.float32


def test_norms_are_those_of_whole_gradients():
    """0, 1, .. 5 is sqrt(55) over both ranks, and 6, 7, 8 sqrt(149); infinity is this rank's."""
    engine = with_gradient(1)
    other = [0 + 1 + 4 + 9 + 16, 0.0]
    norms = GradientNorms(engine, Both(other), lambda: gradient_parts(engine))
    norms.take()  # nothing: the engine holds them until its update
    assert norms.by_name() == pytest.approx({"weight": math.sqrt(55), "bias": math.sqrt(149)})
    assert norms.bad() == []
    engine.optimizer.averaged_gradients[0][1][2] = math.inf
    assert norms.bad() == ["bias"]
