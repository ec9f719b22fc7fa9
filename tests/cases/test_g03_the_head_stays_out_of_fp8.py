# SPDX-License-Identifier: Apache-2.0
"""Case G03: a filter that should spare the output head spared nothing.

Report: huggingface/accelerate#4147.
"""

import json

import pytest

from tests.fix64 import MODEL, options
from tests.inprocess import train
from tests.reading import manifest


@pytest.mark.parametrize("tied", [True, False])
def test_g03_head_and_embeddings_are_not_converted(tmp_path, fix64, tied):
    """By name, tied or not; the tie stays one tensor; the list is the same after a resume."""
    run, lists = tmp_path / "run", []
    model = json.dumps({**MODEL, "tie_word_embeddings": tied})
    for steps in (1, 2):
        words = options(fix64, run, precision="fp8", max_steps=steps, model_config=model)
        done = train([*words, "--allow_unvalidated_fp8", "--accept", "changed_max_steps"])
        assert done.error is None
        facts = manifest(run, steps)["precision"]["fp8"]
        lists.append((facts["converted"], facts["skipped"]))
    assert lists[0] == lists[1]
    converted, skipped = lists[0]
    assert len(converted) == 14
    assert skipped == {"model.embed_tokens": "embedding", "lm_head": "output head"}
    head, embedding = done.model.lm_head.weight, done.model.model.embed_tokens.weight
    assert (head.data_ptr() == embedding.data_ptr()) == tied
