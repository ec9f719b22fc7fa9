# SPDX-License-Identifier: Apache-2.0
"""Case E04: FP16 weights from disk under FP16 mixed precision failed at the first unscale.

Reports: pytorch/pytorch#74739, huggingface/transformers#23165.
"""

import pytest
import torch

from tests.fix64 import options
from tests.inprocess import train
from tests.reading import journal, manifest
from tests.toy_model import tiny_llama


@pytest.fixture
def fp16_folder(tmp_path):
    tiny_llama().half().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_e04_five_steps_from_fp16_weights(tmp_path, fix64, fp16_folder):
    """Trainable parameters are FP32, five steps run, and the manifest says so."""
    words = options(fix64, tmp_path / "run", precision="fp16", max_steps=5, model_config=None,
                    model_name_or_path=fp16_folder)  # fmt: skip
    done = train(words)
    assert done.error is None
    assert {p.dtype for p in done.model.parameters()} == {torch.float32}
    assert len(journal(tmp_path / "run")) == 5
    assert set(manifest(tmp_path / "run", 5)["params"].values()) == {"float32"}
