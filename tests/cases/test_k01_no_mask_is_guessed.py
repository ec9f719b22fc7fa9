# SPDX-License-Identifier: Apache-2.0
"""Case K01: a template without generation marks masked everything, and training "succeeded".

Reports: Liquid4All/liquid-finetune#37, huggingface/trl#4147, huggingface/trl#4201.
"""

import pytest

from mprecipes.data.chat import ChatEncoder
from mprecipes.data.chat_data import prepare_chats
from mprecipes.data.chat_options import ChatOptions
from mprecipes.data.conversations import Conversation
from mprecipes.errors import DataError
from tests.chats import BY_NAME, tokenizer, write_jsonl

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo ok"}]


@pytest.mark.parametrize("name", ["chatml-marked", "chatml"])
def test_k01_with_and_without_marks_the_same_tokens(name):
    """The targets are exactly yo ok and the end token, by marks or by prefixes."""
    shape = BY_NAME[name]
    found = ChatEncoder(tokenizer(shape), shape.template)(Conversation(CHAT))
    assert found.ids[found.targets].tolist() == [*b"yo ok", 257]


def test_k01_empty_marks_are_an_error(tmp_path):
    """Marks that hold nothing end the preparation, naming the row and the template's marks."""
    shape = BY_NAME["chatml-marked"]
    broken = tokenizer(shape)
    broken.hf.chat_template = shape.template.replace(
        "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}",
        "{% endgeneration %}{{ m['content'] + '<|im_end|>' }}",
    )
    source = write_jsonl(tmp_path / "rows.jsonl", [(CHAT, None)])
    from mprecipes.compute.ranks import Ranks

    with pytest.raises(DataError) as error:
        prepare_chats(
            sources={str(source): 1.0}, options=ChatOptions(), tokenizer=broken, seq_length=64,
            eval_fraction=None, ranks=Ranks(), cache_dir=tmp_path / "cache",
        )  # fmt: skip
    assert "generation marks hold no text" in error.value.found
    assert error.value.where == f"{source}:1"
