# SPDX-License-Identifier: Apache-2.0
"""Random numbers keyed by the data, and streams that come back."""

import json
import random

import numpy as np
import pytest
import torch

from mprecipes.compute.randomness import (
    capture_random_state,
    random_key,
    restore_random_state,
    seed_everything,
    seed_micro_batch,
)
from mprecipes.errors import VerificationError

CPU = torch.device("cpu")


def test_keys_are_pinned():
    """The key of a micro-batch is part of every checkpoint's meaning: these values never change."""
    assert random_key(0) == 8147104208329303767
    assert random_key(1234, 0, 3) == 1877546181778583415
    assert random_key(1234, 8, 3) == 2533217654600339604
    assert 0 <= random_key(-1, 1 << 70) < 1 << 63


def test_masks_follow_the_sample_not_the_order_of_calls():
    """The mask of sample 40 is the same whether or not other micro-batches came before."""
    seed_micro_batch(7, 40)
    first = torch.rand(4)
    seed_micro_batch(7, 0)
    torch.rand(100)
    seed_micro_batch(7, 40)
    assert torch.equal(first, torch.rand(4))
    seed_micro_batch(8, 40)
    assert not torch.equal(first, torch.rand(4))


def test_torch_is_seeded_alike_and_numpy_apart_by_rank():
    """Initial weights agree on every rank; augmentation in NumPy does not repeat between ranks."""
    seed_everything(5, rank=0)
    weights, noise, draw = torch.rand(3), np.random.rand(), random.random()
    seed_everything(5, rank=1)
    assert torch.equal(weights, torch.rand(3))
    assert noise != np.random.rand() and draw != random.random()


def test_streams_round_trip_through_json():
    """Python, NumPy and torch go on with the very numbers they would have drawn."""
    seed_everything(11)
    random.gauss(0, 1), np.random.randn()
    state = json.loads(json.dumps(capture_random_state(CPU)))
    expected = (random.gauss(0, 1), random.random(), np.random.randn(), torch.rand(2).tolist())
    seed_everything(12)
    restore_random_state(state, CPU)
    assert expected == (
        random.gauss(0, 1),
        random.random(),
        np.random.randn(),
        torch.rand(2).tolist(),
    )


@pytest.mark.parametrize("stream", ["python", "numpy", "torch"])
def test_a_missing_stream_is_an_error(stream):
    """Case C02: a stream that is not there is never passed over."""
    state = capture_random_state(CPU)
    del state[stream]
    with pytest.raises(VerificationError) as caught:
        restore_random_state(state, CPU)
    assert stream in caught.value.found
    assert "python, numpy and torch" in caught.value.expected
    assert caught.value.where == "random state of this rank"
    assert "previous checkpoint" in caught.value.action
