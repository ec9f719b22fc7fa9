# SPDX-License-Identifier: Apache-2.0
"""Case G07: history was appended to the state and checkpoints grew (TransformerEngine#231)."""

import contextlib

import pytest
import torch

from tests.toys import Run

PRECISIONS = {
    "fp32": contextlib.nullcontext,
    "bf16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_g07_steps_5_50_and_100_are_of_one_size(tmp_path, precision):
    """Bytes of all files together differ by less than 1 %."""
    run = Run(tmp_path, width=16, num_layers=2)
    with PRECISIONS[precision]():
        for first, last in ((1, 5), (6, 50), (51, 100)):
            run.train(range(first, last), save=False)
            run.train([last])
    folders = sorted(run.folder.checkpoints.glob("step-*"))
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in folders]
    assert len(sizes) == 3
    assert max(sizes) < 1.01 * min(sizes)
