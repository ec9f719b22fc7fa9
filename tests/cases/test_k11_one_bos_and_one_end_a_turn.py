# SPDX-License-Identifier: Apache-2.0
"""Case K11: the template wrote the BOS and the tokenizer added another, or an end came twice.

Reports: huggingface/alignment-handbook#127, huggingface/trl#3091.
"""

import pytest

from mprecipes.data.chat import ChatEncoder
from mprecipes.data.conversations import Conversation
from tests.chats import BY_NAME, tokenizer

CHAT = [
    {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
]  # fmt: skip


@pytest.mark.parametrize(("name", "num_ends"), [("llama3", 4), ("mistral", 2), ("gemma", 4)])
def test_k11_as_the_template_says(name, num_ends):
    """A tokenizer that adds both by default: one BOS, the template's ends, the same ids."""
    shape = BY_NAME[name]
    made = tokenizer(shape, adds_bos=True)
    assert made.hf("a").input_ids[0] == made.hf.bos_token_id == 256
    found = ChatEncoder(made, shape.template)(Conversation(CHAT)).ids.tolist()
    assert (found[0], found.count(256), found.count(made.eos_id)) == (256, 1, num_ends)
    assert found == made.hf.apply_chat_template(CHAT, tokenize=True, return_dict=False)
