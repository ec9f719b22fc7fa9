# SPDX-License-Identifier: Apache-2.0
"""A small Llama with AdamW, its checkpoint by a real manager, and a watch on memory."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mprecipes.checkpoint.manager import CheckpointManager
from mprecipes.checkpoint.manifest import Manifest, read_manifest
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position
from mprecipes.data.tokens import load_tokenizer
from tests.kept import Folder

FACTS = {
    "recipe": {"name": "toy_lm", "version": "1.2.3", "based_on": None, "sha256": "a" * 64},
    "precision": {"mode": "bf16"},
    "data": {"fingerprint": "f" * 16, "source": "stdlib"},
    "config": {"learning_rate": 0.01},
}
SIZES = {
    "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def tiny(*, tied: bool = True, **sizes: int) -> torch.nn.Module:
    """Gives a Llama of random weights, the same at each call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **{**SIZES, **sizes}, tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config)


def save(
    run: Path,
    model: torch.nn.Module,
    *,
    step: int = 7,
    template: str | None = None,
    tokenizer_dir: Path | None = None,
    milestone: str | None = None,
    facts: dict | None = None,
) -> Manifest:
    """Publishes a checkpoint of the model after one update of AdamW; gives its manifest."""
    if tokenizer_dir is None:
        tokenizer_dir = run / "tokenizer"
        tokenizer = load_tokenizer("bytes")
        tokenizer.hf.chat_template = template
        tokenizer.save(tokenizer_dir)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    folder = Folder(run)
    with CheckpointManager(
        folder, Ranks(), model, optimizer, tokenizer_dir=tokenizer_dir
    ) as manager:
        manager.save(
            Position(step, step, 2 * step, 10 * step), facts=FACTS | (facts or {}), rank_state={},
            metrics={"eval/loss": 2.5, "eval/odd": float("nan")}, milestone=milestone, wait=True,
        )  # fmt: skip
    return read_manifest(folder.checkpoints / f"step-{step:08d}")


class Peak:
    """Attributes: num_bytes, the most memory of its own this process had above the start."""

    num_bytes = 0


@contextmanager
def anonymous_memory() -> Iterator[Peak]:
    """Watches what this process holds that no file backs, from here to the end of the block."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    peak, began, done = Peak(), _anonymous(), threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak.num_bytes = max(peak.num_bytes, _anonymous() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
