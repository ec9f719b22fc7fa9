# SPDX-License-Identifier: Apache-2.0
"""Text to token ids: bytes (the default), a Hugging Face tokenizer, or one trained here.

Promises: the text of a document never becomes a special token, every document ends with one EOS,
and the folder `save` writes loads with `AutoTokenizer` and gives the same ids. The byte tokenizer
is a byte-level BPE without merges: ids 0..255 are the bytes of the text in UTF-8, 256 is the EOS.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mprecipes.errors import ConfigError, DataError
from mprecipes.identity.files import canonical_json

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
MIN_TRAINED_VOCAB = 257


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer with what packing must know of it.

    Attributes:
        digest: SHA-256 of everything that decides the ids; independent of where it was loaded from.
        vocab_size: number of ids, added tokens included.
    """

    name: str
    hf: Any
    digest: str
    vocab_size: int
    eos_id: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint16 if self.vocab_size < 65536 else np.uint32)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Gives the ids of each text and the EOS behind it."""
        if self.name == BYTES:
            encoded = [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]
        else:
            options = {"add_special_tokens": False, "return_attention_mask": False}
            encoded = self.hf(texts, split_special_tokens=True, verbose=False, **options)[
                "input_ids"
            ]
        return [
            np.append(np.asarray(ids, self.dtype), self.dtype.type(self.eos_id)) for ids in encoded
        ]

    def save(self, folder: Path) -> None:
        """Writes a folder that `AutoTokenizer.from_pretrained` loads."""
        self.hf.save_pretrained(folder)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> TextTokenizer:
    """Gives the tokenizer `bytes`, or the one of a folder, a GGUF file or a hub id.

    Args:
        trust_remote_code: let code that comes with the tokenizer run.

    Raises:
        DataError: there is none of this name, or it has no EOS to separate documents with.
    """
    if name == BYTES:
        return _byte_tokenizer()
    place: dict[str, Any] = {"pretrained_model_name_or_path": name}
    if name.endswith(".gguf"):
        path = Path(name)
        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        hf = AutoTokenizer.from_pretrained(**place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            f"no tokenizer could be loaded: {str(error).splitlines()[0]}",
            expected=f"{BYTES!r}, a folder with a saved tokenizer, or a hub id that can be reached",
            where=f"tokenizer {name}",
            action=f"correct --tokenizer, or use --tokenizer {BYTES}",
        ) from error
    return _described(name, hf)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Gives a byte-level BPE trained on `texts`; the same texts give the same tokenizer.

    Raises:
        ConfigError: `vocab_size` does not hold the 256 bytes and the EOS.
    """
    if vocab_size < MIN_TRAINED_VOCAB:
        raise ConfigError(
            f"train_tokenizer_vocab {vocab_size}",
            expected=f"at least {MIN_TRAINED_VOCAB}: 256 bytes and the end-of-text token",
            where="train_tokenizer_vocab",
            action=f"set --train_tokenizer_vocab {MIN_TRAINED_VOCAB} or more, or none for bytes",
        )
    tokenizer = _byte_level(Tokenizer(models.BPE()), use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
    return _described(f"trained-{vocab_size}", hf)


def _byte_tokenizer() -> TextTokenizer:
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = _byte_level(Tokenizer(models.BPE(vocab=vocab, merges=[])), use_regex=False)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, split_special_tokens=True
    )
    digest = hashlib.sha256(b"the bytes of the text in UTF-8, then 256").hexdigest()
    return TextTokenizer(BYTES, hf, digest, vocab_size=257, eos_id=256)


def _byte_level(tokenizer: Tokenizer, *, use_regex: bool) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _described(name: str, hf: Any) -> TextTokenizer:
    if hf.eos_token_id is None:
        raise DataError(
            "a tokenizer without an end-of-sequence token",
            expected="an eos_token, which separates documents in a packed row",
            where=f"tokenizer {name}",
            action="set eos_token in its tokenizer_config.json, or choose another tokenizer",
        )
    rules = hf.backend_tokenizer.to_str() if hf.is_fast else canonical_json(hf.get_vocab()).decode()
    digest = hashlib.sha256(f"{hf.eos_token_id} {rules}".encode()).hexdigest()
    return TextTokenizer(name, hf, digest, vocab_size=len(hf), eos_id=hf.eos_token_id)
