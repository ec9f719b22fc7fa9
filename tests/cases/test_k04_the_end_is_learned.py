# SPDX-License-Identifier: Apache-2.0
"""Case K04: the pad token was the end token, so the end was masked, and models never stopped.

Reports: huggingface/trl#976, huggingface/trl#1623, huggingface/alignment-handbook#127,
huggingface/open-r1#494.
"""

from mprecipes.compute.ranks import Ranks
from mprecipes.data.chat_data import prepare_chats
from mprecipes.data.chat_options import ChatOptions
from tests.chats import BY_NAME, tokenizer, write_jsonl


def test_k04_padding_is_masked_by_place_and_both_ends_are_targets(tmp_path):
    """Two rows of unlike length, pad == eos: one masked pad, and every true end is a target."""
    shape = BY_NAME["mistral"]
    made = tokenizer(shape)
    assert made.hf.pad_token_id == made.hf.eos_token_id == 257
    source = write_jsonl(
        tmp_path / "rows.jsonl",
        [{"prompt": "h", "completion": "yo"}, {"prompt": "h", "completion": "y"}],
    )
    data = prepare_chats(
        sources={str(source): 1.0}, options=ChatOptions(batching="plain"), tokenizer=made,
        seq_length=16, eval_fraction=None, ranks=Ranks(), cache_dir=tmp_path / "cache",
    ).train  # fmt: skip
    first, second = data.__getitems__([0, 1])
    assert first["labels"].tolist() == [-100, *b"yo", 257]
    assert second["labels"].tolist() == [-100, *b"y", 257, -100]
    assert second["input_ids"].tolist() == [*b"hy", 257, 257]
