# SPDX-License-Identifier: Apache-2.0
"""Text to ids: bytes, trained and loaded tokenizers."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mprecipes.data.tokens import load_tokenizer, train_tokenizer
from mprecipes.errors import ConfigError, DataError

TEXTS = ["", "abc", "h\u00e9 \u65e5\n\t\x00 <|endoftext|> \U0001f600", "  two  spaces\r\n"]


def test_bytes_are_the_utf8_of_the_text_and_an_eos():
    """The default needs no file: an id is a byte, and 256 ends a document."""
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(["h\u00e9"])[0]
    assert ids.tolist() == [104, 195, 169, 256]
    assert ids.dtype == np.uint16
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)


def test_the_saved_byte_tokenizer_gives_the_same_ids(tmp_path):
    """What AutoTokenizer loads from the folder agrees with the fast path and decodes exactly."""
    tokenizer = load_tokenizer("bytes")
    tokenizer.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(loaded), loaded.eos_token_id) == (257, 256)
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS)):
        assert loaded(text)["input_ids"] == ids[:-1].tolist()
        assert loaded.decode(ids[:-1].tolist()) == text


def test_training_is_deterministic_and_round_trips(tmp_path):
    """The same texts give the same tokenizer, whose folder loads with the same digest and ids."""
    texts = [f"def f{i}(x): return x + {i % 7}\n" for i in range(200)]
    first, second = train_tokenizer(texts, 300), train_tokenizer(iter(texts), 300)
    assert first.digest == second.digest
    assert first.vocab_size == 300
    first.save(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.digest == first.digest
    for text, one, two in zip(TEXTS, first.encode(TEXTS), loaded.encode(TEXTS)):
        assert one.tolist() == two.tolist()
        assert one[-1] == first.eos_id
        assert first.eos_id not in one[:-1]  # text that spells the EOS is text
        assert loaded.hf.decode(two[:-1].tolist()) == text
    assert train_tokenizer([*texts, "zzzz zzzz"], 300).digest != first.digest


def test_the_width_of_ids_follows_the_vocabulary():
    """Sixteen bits hold fewer than 65536 ids, more take thirty-two."""
    vocab = {f"w{i}": i for i in range(65536)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1")
    small = train_tokenizer(["ab"], 257)
    large = type(small)("large", hf, "", vocab_size=len(hf), eos_id=1)
    assert (small.dtype, large.dtype) == (np.uint16, np.uint32)
    assert large.encode(["w65535"])[0].tolist() == [65535, 1]


def test_a_vocabulary_below_the_bytes_is_refused():
    """A trained vocabulary must hold every byte, or some text could not be written."""
    with pytest.raises(ConfigError) as caught:
        train_tokenizer(["a"], 256)
    error = caught.value
    assert (error.found, error.where) == ("train_tokenizer_vocab 256", "train_tokenizer_vocab")
    assert "257" in error.expected
    assert "--train_tokenizer_vocab 257" in error.action


def test_a_missing_tokenizer_is_refused(tmp_path):
    """An empty folder is named with what would have been right."""
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(tmp_path))
    error = caught.value
    assert error.found.startswith("no tokenizer could be loaded")
    assert "saved tokenizer" in error.expected
    assert error.where == f"tokenizer {tmp_path}"
    assert "--tokenizer bytes" in error.action


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    """Documents cannot be separated without an EOS, and none is made up."""
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(tmp_path))
    error = caught.value
    assert error.found == "a tokenizer without an end-of-sequence token"
    assert "eos_token" in error.expected
    assert error.where == f"tokenizer {tmp_path}"
    assert "tokenizer_config.json" in error.action
