# SPDX-License-Identifier: Apache-2.0
"""The product over the vocabulary grows; the vocabulary does not."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from mprecipes.compute.vocabulary import output_head, pad_vocabulary
from mprecipes.errors import ConfigError, ContractRefused
from tests.fix64 import options, write_rows
from tests.inprocess import train
from tests.reading import journal, manifest
from tests.toy_model import tiny_llama, tokens


def step(model):
    logits = model(input_ids=tokens()).logits
    loss = F.cross_entropy(logits.flatten(0, 1), tokens().flatten())
    model.zero_grad()
    loss.backward()
    return logits, loss, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_logits_loss_and_gradients_are_those_of_the_vocabulary(tied):
    """257 words in a product of 272: the same shapes, names and, but for rounding, numbers."""
    model = tiny_llama(tie_word_embeddings=tied)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    logits, loss, gradients = step(model)
    assert pad_vocabulary(model, 16) == [257, 272]
    padded, padded_loss, padded_gradients = step(model)
    assert padded.shape == logits.shape and padded.argmax(-1).max() < 257
    torch.testing.assert_close(padded, logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(padded_loss, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(padded_gradients, gradients, rtol=1e-4, atol=1e-7)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes


def test_the_product_really_has_the_size(monkeypatch):
    """F.linear is given 272 rows of weight, and a bias of as many."""
    model, seen = tiny_llama(), []
    head = output_head(model)
    head.bias = torch.nn.Parameter(torch.ones(257))
    before = head(torch.ones(1, 32))
    pad_vocabulary(model, 16)
    linear = F.linear
    monkeypatch.setattr(
        F, "linear", lambda x, w, b: seen.append((w.shape, b.shape)) or linear(x, w, b)
    )
    torch.testing.assert_close(head(torch.ones(1, 32)), before)
    assert seen == [((272, 32), (272,))]


def test_a_vocabulary_that_is_a_multiple_is_left_alone():
    """256 words: no other forward."""
    model = tiny_llama(vocab_size=256)
    assert pad_vocabulary(model, 16) == [256, 256] and "forward" not in vars(model.lm_head)


def test_a_model_without_such_a_head_is_refused():
    """A bare module, and a head that is no Linear."""
    model = tiny_llama()
    model.set_output_embeddings(torch.nn.Identity())
    for refused in (torch.nn.Linear(2, 2), model):
        with pytest.raises(ConfigError) as caught:
            pad_vocabulary(refused, 8)
        assert "head of" in caught.value.found and "vocab_size" in caught.value.action


def test_a_run_trains_the_same_model_and_the_contract_knows(tmp_path):
    """Losses agree, the export has 257 words as its tokenizer; going on without it is refused."""
    rows, losses = write_rows(tmp_path / "rows.jsonl"), []
    for multiple in (None, 16):
        run = tmp_path / str(multiple)
        numerics = json.dumps({"pad_vocab_to_multiple_of": multiple})
        words = options(rows, run, precision="bf16", max_steps=5, numerics=numerics)
        assert train(words).error is None
        losses.append([line["loss"] for line in journal(run).values()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    facts = manifest(run, 5)["precision"]
    assert facts["padded_vocabulary"] == [257, 272]
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.vocab_size == 257
    again = train(options(rows, run, precision="bf16", max_steps=6))
    assert isinstance(again.error, ContractRefused) and "pad_vocab" in str(again.error)
