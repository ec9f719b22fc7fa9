# SPDX-License-Identifier: Apache-2.0
"""What the model says to a few held-out prompts, greedily: for people, beside the numbers."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoTokenizer

from mprecipes.compute.attention import bare_model
from mprecipes.compute.launch import Launch
from mprecipes.compute.tuning import tuning_options
from mprecipes.data.chat_rows import IGNORED, ChatRows
from mprecipes.data.packing import PreparedData

ANSWER_COLUMNS = ("prompt", "answer", "given")


@torch.no_grad()
def greedy_answers(
    model: torch.nn.Module, data: PreparedData, launch: Launch, tuning: Mapping[str, Any] | None
) -> list[list[str]]:
    """Collective: gives (prompt, answer, the answer in the data) of the first held-out rows.

    Draws no random numbers and leaves the model in training mode.

    Args:
        tuning: the option, for `num_generations` and `max_new_tokens`.
    """
    options = tuning_options(tuning)
    prompts = heldout_prompts(data.heldout, options.num_generations)
    tokenizer: Any = AutoTokenizer.from_pretrained(data.tokenizer_dir)
    bare: Any = bare_model(model)
    rows = []
    model.eval()
    for prompt, given in prompts:
        ids = prompt[None].to(launch.device)
        said = bare.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=options.max_new_tokens,
            pad_token_id=data.eos_id,
            eos_token_id=data.eos_id,
        )[0, len(prompt) :]
        rows.append([tokenizer.decode(each) for each in (prompt, said, given)])
    model.train()
    return rows


def heldout_prompts(heldout: Any, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gives (prompt ids, ids of the answer that was given) of the first `count` held-out rows.

    Of each row the first conversation, up to its first target; both (seq,) int64, on the host.
    """
    assert isinstance(heldout, ChatRows), type(heldout)
    found = []
    for row in range(min(count, len(heldout))):
        item = heldout[row]
        first_piece = item["segment_ids"] == 0
        ids = item["input_ids"][first_piece]
        is_target = item["labels"][first_piece] != IGNORED
        begin = int(is_target.nonzero()[0])
        others = (~is_target[begin:]).nonzero().flatten().tolist()
        end = begin + others[0] if others else len(ids)
        found.append((ids[:begin], ids[begin:end]))
    return found
