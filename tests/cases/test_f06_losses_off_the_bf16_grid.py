# SPDX-License-Identifier: Apache-2.0
"""Case F06: the loss was computed on BF16 logits and its curve looked like stairs.

Reports: Modalities/modalities#464, google-deepmind/optax#1020.
"""

import pytest
import torch

from mprecipes import read_metrics
from tests.reading import journal

pytestmark = pytest.mark.launch


def test_f06_logged_losses_are_no_bf16_numbers(from_bf16):
    """Of 50 logged losses of a BF16 run more than 45 are not representable in BF16."""
    logged = [
        line for line in read_metrics(from_bf16.run / "metrics.jsonl")[0] if "train/loss" in line
    ]
    losses = {line["step"]: line["train/loss"] for line in logged}
    assert losses == {step: line["loss"] for step, line in journal(from_bf16.run).items()}
    assert list(losses) == list(range(1, 51))
    off_grid = [x for x in losses.values() if torch.tensor(x, dtype=torch.bfloat16).item() != x]
    assert len(off_grid) > 45
