# SPDX-License-Identifier: Apache-2.0
"""A model whose norms and softmax the mode holds in FP32 resumes as what it was, bit for bit."""

import json

import pytest

from tests.fix64 import options, write_rows
from tests.reading import journal, manifest
from tests.recipe_server import run_recipe

pytestmark = pytest.mark.faults
PHI = {  # layer norms of queries and keys, in 16 bit without the mode
    "model_type": "phi", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16,
    "qk_layernorm": True, "attention_dropout": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_killed_and_resumed_it_is_the_uninterrupted_run(tmp_path, precision):
    """SIGKILL at step 6, resumed from 4: losses and norms of ten steps are the same bits."""
    rows, found = write_rows(tmp_path / "rows.jsonl"), []
    for name, fault in (("whole", ""), ("cut", "kill@step:6")):
        run = tmp_path / name
        words = options(rows, run, precision=precision, model_config=json.dumps(PHI), save_steps=4)
        done = run_recipe(words, env={"MPRECIPES_FAULT": fault} if fault else {})
        if fault:
            assert done.code == -9, done.output
            done = run_recipe(words)
        assert done.code == 0, done.output
        facts = manifest(run, 10)["precision"]["operators_in_fp32"]
        assert facts["layer_norm"] == facts["softmax"] == "mode"
        lines = journal(run).values()
        found.append([(line["loss"].hex(), line["grad_norm"].hex()) for line in lines])
    assert len(found[0]) == 10 and found[0] == found[1]
