# SPDX-License-Identifier: Apache-2.0
"""Greedy answers to held-out prompts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mprecipes import ANSWER_COLUMNS, greedy_answers
from mprecipes.data.answers import heldout_prompts
from mprecipes.data.chat_rows import ChatRows, write_rows
from mprecipes.data.fitting import Piece
from mprecipes.data.tokens import load_tokenizer

MODEL = {
    "vocab_size": 257, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture
def heldout(tmp_path):
    """Two rows; the first holds two conversations, of which the first has two answers."""
    targets = np.array([0, 0, 1, 1, 0, 1], dtype=bool)
    first = Piece(np.frombuffer(b"Q:yes!", np.uint8).astype(np.uint16), targets)
    second = Piece(np.array([90, 65, 256], np.uint16), np.array([False, True, True]))
    write_rows(tmp_path, "heldout", [first, second], [[0, 1], [1]])
    return ChatRows(tmp_path, "heldout", seq_length=10, dtype="uint16", pad_id=0)


def test_prompts_end_where_the_first_target_is(heldout):
    """Of each row the first conversation up to its first target, and that answer alone."""
    found = [(a.tolist(), b.tolist()) for a, b in heldout_prompts(heldout, 9)]
    assert found == [([*b"Q:"], [*b"ye"]), ([90], [65, 256])]
    assert len(heldout_prompts(heldout, 1)) == 1


def test_answers_are_greedy_and_draw_nothing(heldout, tmp_path):
    """The likeliest tokens after the prompt; random streams and training mode stay as they were."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MODEL))
    load_tokenizer("bytes").save(tmp_path / "tokenizer")
    data = SimpleNamespace(heldout=heldout, tokenizer_dir=tmp_path / "tokenizer", eos_id=256)
    launch = SimpleNamespace(device=torch.device("cpu"))
    tuning, before = {"num_generations": 1, "max_new_tokens": 3}, torch.get_rng_state()
    [[prompt, answer, given]] = greedy_answers(model, data, launch, tuning)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert (prompt, given, len(ANSWER_COLUMNS)) == ("Q:", "ye", 3)
    ids = list(b"Q:")
    for _ in range(3):
        with torch.no_grad():
            ids.append(int(model.eval()(torch.tensor([ids])).logits[0, -1].argmax()))
    expected = load_tokenizer("bytes").hf.decode(ids[2:])
    assert answer == expected
