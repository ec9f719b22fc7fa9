# SPDX-License-Identifier: Apache-2.0
"""Case C05 (huggingface/transformers#46628, #39215): rows to be skipped were really read, and a
data set with random augmentation moved the restored random streams."""

import itertools
import random

import numpy as np
import pytest
import torch

from mprecipes.compute.ranks import BatchPlan
from mprecipes.data.order import SampleOrder, micro_batches


class Augmented:
    """Tokens and a random mask from each of the three streams; counts the rows it gives."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 64

    def __getitem__(self, row):
        self.read.append(row)
        masks = [torch.rand(16) < 0.5, torch.from_numpy(np.random.rand(16) < 0.5)]
        masks.append(torch.tensor([random.random() < 0.5 for _ in range(16)]))
        return {"input_ids": torch.full((16,), row), "mask": torch.stack(masks)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_content_after_a_cut_is_that_of_the_uncut_run(num_workers):
    """From step 6 on, ids and masks equal the uncut run's; no skipped row is read."""
    order, plan = SampleOrder(64, 0), BatchPlan(4, 1, 1, 0)
    whole = list(itertools.islice(micro_batches(Augmented(), order, plan, start=0), 16))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    data = Augmented()
    batches = micro_batches(data, order, plan, start=20, num_workers=num_workers)
    for expected, found in zip(whole[5:], batches):
        assert torch.equal(expected.tensors["input_ids"], found.tensors["input_ids"])
        assert torch.equal(expected.tensors["mask"], found.tensors["mask"])
    batches.close()
    if not num_workers:
        assert data.read[:44] == order(20, 44).tolist()
