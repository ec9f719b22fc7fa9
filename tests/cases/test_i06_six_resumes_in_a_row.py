# SPDX-License-Identifier: Apache-2.0
"""Case I06: each resume added tensors, and checkpoints grew from 87 MB to 110 MB.

Reports: huggingface/diffusers#6366, huggingface/peft#353.
"""

import pytest

from tests.cases.conftest import CUTS, NUM_STEPS
from tests.reading import checkpoint, journal, tensors

pytestmark = pytest.mark.launch


def test_i06_every_checkpoint_of_seven_processes_is_alike(cut_run):
    """Names, shapes and dtypes of all 48 are those of the first; sizes differ below 1 %."""
    path = cut_run.path
    assert {line["attempt"] for line in journal(path).values()} == set(range(len(CUTS) + 1))
    shapes, sizes = [], []
    for step in range(1, NUM_STEPS + 1):
        shapes.append({name: (x.shape, x.dtype) for name, x in tensors(path, step).items()})
        sizes.append(sum(file.stat().st_size for file in checkpoint(path, step).iterdir()))
    assert all(found == shapes[0] for found in shapes)
    assert len(shapes[0]) == 4 * 20  # 20 parameters: weight, two moments and a step count each
    assert max(sizes) < 1.01 * min(sizes)
