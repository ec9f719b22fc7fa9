# SPDX-License-Identifier: Apache-2.0
"""Case F05: gradients were accumulated in BF16, where a sum of many stops growing.

Reports: deepspeedai/DeepSpeed#1800, deepspeedai/DeepSpeed#2768, deepspeedai/DeepSpeed#2352.
"""

import json

import pytest
import torch

from tests.fix64 import MODEL, RECIPE, options
from tests.launching import launch
from tests.reading import journal, manifest, tensors

pytestmark = pytest.mark.launch


def test_f05_1024_micro_batches_of_one_row_are_16_of_64(tmp_path, fix64):
    """The gradient of 1024 rows is the same within 2 %; in BF16 sums most would be lost."""
    gradients, norms = [], []
    for size, accumulation in ((64, 16), (1, 1024)):
        run = tmp_path / str(size)
        words = options(
            fix64, run, model_config=json.dumps({**MODEL, "attention_dropout": 0.0}), max_steps=1,
            warmup_steps=0, max_grad_norm=None, precision="bf16", per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        done = launch(RECIPE, words)
        assert done.returncode == 0, done.output
        assert manifest(run, 1)["samples_seen"] == 1024
        assert manifest(run, 1)["precision"]["mode"] == "bf16"
        saved = tensors(run, 1)
        names = sorted(name for name in saved if name.endswith("/exp_avg"))
        gradients.append(torch.cat([saved[name].flatten() for name in names]))
        norms.append(journal(run)[1]["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert (gradients[1] - gradients[0]).norm() < 0.02 * gradients[0].norm()
