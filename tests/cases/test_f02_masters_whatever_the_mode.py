# SPDX-License-Identifier: Apache-2.0
"""Case F02: loading followed the checkpoint's dtype, and BF16 weights were trained in silence.

Reports: huggingface/sentence-transformers#3773, verl-project/verl#749.
"""

import hashlib

import torch

from tests.fix64 import options
from tests.inprocess import train
from tests.toy_model import tiny_llama


def test_f02_the_same_fp32_weights_in_every_mode(tmp_path, fix64):
    """From one BF16 folder fp32, bf16, fp16 and fp8 begin with the same FP32 parameters."""
    tiny_llama().bfloat16().save_pretrained(tmp_path / "model")
    digests = {}

    def change(recipe):
        compute_loss = recipe.compute_loss

        def first(model, batch):
            if precision not in digests:
                digest = hashlib.sha256()
                for name, parameter in sorted(model.named_parameters()):
                    assert parameter.dtype == torch.float32, name
                    digest.update(name.removeprefix("module.").encode())
                    digest.update(parameter.detach().numpy().tobytes())
                digests[precision] = digest.hexdigest()
            return compute_loss(model, batch)

        recipe.compute_loss = first

    for precision in ("fp32", "bf16", "fp16", "fp8"):
        words = options(fix64, tmp_path / precision, precision=precision, max_steps=1,
                        model_config=None, model_name_or_path=tmp_path / "model")  # fmt: skip
        assert train([*words, "--allow_unvalidated_fp8"], change).error is None
    assert len(digests) == 4 and len(set(digests.values())) == 1
