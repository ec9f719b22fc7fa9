# SPDX-License-Identifier: Apache-2.0
"""Case F01: weights and optimizer state in BF16 rounded small updates away, in silence.

Reports: areal-project/AReaL#1292, meta-pytorch/torchtune#2254, NVIDIA/apex#1728.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.reading import manifest, tensors

pytestmark = pytest.mark.launch


def test_f01_weights_and_moments_are_fp32(from_bf16):
    """Begun from a BF16 folder and run in BF16, the checkpoint holds FP32 and nothing else."""
    stored = AutoModelForCausalLM.from_pretrained(from_bf16.folder, dtype="auto")
    assert {parameter.dtype for parameter in stored.parameters()} == {torch.bfloat16}
    saved, described = tensors(from_bf16.run, 50), manifest(from_bf16.run, 50)
    assert described["precision"]["mode"] == "bf16"
    assert described["precision"]["compute_dtype"] == "bfloat16"
    assert set(described["params"].values()) == {"float32"}
    parameters = [name for name, _ in stored.named_parameters()]
    for name in parameters:
        for kind in (
            f"weights/{name}",
            f"optimizer/{name}/exp_avg",
            f"optimizer/{name}/exp_avg_sq",
        ):
            assert saved[kind].dtype == torch.float32, kind
    assert len(saved) == 4 * len(parameters)  # the weight, two moments and a step count each


def test_f01_updates_below_a_bf16_rounding_step_are_kept(from_bf16):
    """50 updates of at most 1e-4 move the norm weights off 1.0; in BF16 they stay (step 0.0078)."""
    saved = tensors(from_bf16.run, 50)
    norm = saved["weights/model.norm.weight"]
    moved = (norm - 1.0).abs()
    assert (moved > 0).all()
    assert moved.max() < 0.0039
    assert torch.equal(norm.bfloat16(), torch.ones_like(norm).bfloat16())
