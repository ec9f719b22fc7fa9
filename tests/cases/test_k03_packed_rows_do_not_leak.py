# SPDX-License-Identifier: Apache-2.0
"""Case K03: packed samples attended to earlier samples in the same row, and nobody noticed.

Reports: huggingface/trl#3067, huggingface/transformers#46634, meta-pytorch/torchtune#875.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from mprecipes import packed_inputs
from mprecipes.data.chat_rows import ChatRows, write_rows
from mprecipes.data.fitting import Piece
from tests.sft import MODEL


@pytest.fixture
def row(tmp_path):
    """Samples of 5 and 6 tokens in one row; everything but the first of each is a target."""
    draw = np.random.default_rng(0)
    pieces = []
    for length in (5, 6):
        targets = np.arange(length) > 0
        pieces.append(Piece(draw.integers(0, 257, length).astype(np.uint16), targets))
    write_rows(tmp_path, "train", pieces, [[0, 1]])
    data = ChatRows(tmp_path, "train", seq_length=12, dtype="uint16", pad_id=0)
    return data, {name: tensor[None] for name, tensor in data[0].items()}


def model(backend):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODEL)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=backend).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0)
    return made


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_k03_the_second_sample_is_as_if_alone(row, backend):
    """Its logits differ by less than 1e-5, and a change in the first one changes nothing."""
    data, batch = row
    made = model(backend)
    logits = made(**packed_inputs(made, batch), use_cache=False).logits[0]
    alone = made(input_ids=batch["input_ids"][:, 5:11], use_cache=False).logits[0]
    assert (logits[5:11] - alone).abs().max() < 1e-5
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 2] += 1
    other = made(**packed_inputs(made, changed), use_cache=False).logits[0]
    assert torch.equal(other[5:11], logits[5:11])
    assert not torch.equal(other[2:5], logits[2:5])
    labels = F.pad(batch["labels"][0, 1:], (0, 1), value=-100)
    assert (labels != -100).sum() == data.num_targets(np.array([0])) == 4 + 5
    assert labels[4] == -100  # the first token of the second sample has no prediction
