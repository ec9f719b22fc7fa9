# SPDX-License-Identifier: Apache-2.0
"""An SFT recipe's one call for its data."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from mprecipes.compute.ranks import Ranks
from mprecipes.compute.tuning import tuning_options
from mprecipes.data.cache import default_cache_dir
from mprecipes.data.chat_data import prepare_chats
from mprecipes.data.chat_options import chat_options
from mprecipes.data.packing import PreparedData
from mprecipes.data.tokens import BYTES, load_tokenizer
from mprecipes.errors import ConfigError
from mprecipes.identity.files import sha256_file, write_atomically


class ChatDataOptions(Protocol):
    """The options of a recipe's config that `read_chats` reads."""

    @property
    def dataset(self) -> str: ...
    @property
    def chat(self) -> dict[str, Any] | None: ...
    @property
    def tokenizer(self) -> str | None: ...
    @property
    def model_name_or_path(self) -> str | None: ...
    @property
    def tuning(self) -> dict[str, Any] | None: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def eval_fraction(self) -> float | None: ...


def read_chats(
    config: ChatDataOptions, ranks: Ranks, *, should_stop: Callable[[], bool]
) -> PreparedData:
    """Collective: gives the training and held-out conversations a config asks for.

    Raises:
        ConfigError, DataError, Preempted: see `prepare_chats`.
    """
    options = chat_options(config.chat)
    trusted = tuning_options(config.tuning).trust_remote_code
    name = config.tokenizer or tokenizer_of(config.model_name_or_path)
    return prepare_chats(
        sources=options.weights(config.dataset),
        options=options,
        tokenizer=load_tokenizer(name, trust_remote_code=trusted),
        seq_length=config.seq_length,
        eval_fraction=config.eval_fraction or None,
        ranks=ranks,
        should_stop=should_stop,
    )


def tokenizer_of(model: str | None) -> str:
    """Gives the tokenizer that belongs to a model: its own folder or file, or bytes for a new one.

    That of a checkpoint or milestone is written to the cache, from what the checkpoint keeps.

    Raises:
        ConfigError: the checkpoint keeps none, or another than its manifest says.
    """
    folder = Path(model or "")
    if model is None or not (folder / "manifest.json").is_file():
        return model or BYTES
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if (manifest.get("data") or {}).get("tokenizer") == BYTES:
        return BYTES
    digests = {entry["path"]: entry["sha256"] for entry in manifest.get("files", ())}
    kept = folder / "pretrained.json"
    digest = sha256_file(kept) if kept.is_file() else "none"
    if digest != digests.get(kept.name):
        raise ConfigError(
            f"{kept.name} with SHA-256 {digest}",
            expected=f"SHA-256 {digests.get(kept.name)}, as its manifest says",
            where=f"model_name_or_path {model}",
            action="name another checkpoint, or the tokenizer: --tokenizer FOLDER",
        )
    value = json.loads(kept.read_text(encoding="utf-8"))
    files = {name: text.encode("utf-8") for name, text in value["texts"].items()}
    files |= {name: base64.b64decode(text) for name, text in value["binaries"].items()}
    written = default_cache_dir() / "tokenizers" / digest[:32]
    for name, data in files.items():
        path = written / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    return str(written)
