# SPDX-License-Identifier: Apache-2.0
"""48 small chats with very uneven answers, and the options of a tiny SFT run over them."""

import importlib.util
import json
from pathlib import Path

from tests.chats import write_jsonl

ROOT = Path(__file__).parents[1]
CHAT = ROOT / "recipes" / "sft_chat.py"
LORA = ROOT / "recipes" / "sft_lora.py"

MODEL = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 96, "attention_dropout": 0.1, "tie_word_embeddings": True,
}  # fmt: skip


def write_chats(path: Path, count: int = 48) -> Path:
    """Writes `count` chats; answers have 3 to 40 characters."""
    rows = []
    for number in range(count):
        answer = "yes" if number % 3 else f"no {number} " * (1 + number % 8)
        turns = [("user", f"is {number} odd?" * (1 + number % 3)), ("assistant", answer)]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return write_jsonl(path, rows)


def options(data: Path, output_dir: Path | None, **changed: object) -> list[str]:
    """Gives the command line of a tiny run; dicts are written as JSON, None as none."""
    values: dict[str, object] = {
        "dataset": data, "seq_length": 96, "eval_fraction": None, "model_config": MODEL,
        "per_device_train_batch_size": 2, "global_batch_size": 4, "max_steps": 12,
        "warmup_steps": 2, "learning_rate": 1e-3, "save_steps": 4, "keep_last": 3,
        "logging_steps": 4, "checkpoint": {"synchronous": True}, **changed,
    }  # fmt: skip
    if output_dir is not None:
        values["output_dir"] = output_dir
    words = []
    for name, value in values.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        words += [f"--{name}", "none" if value is None else text]
    return words


def load(recipe: Path):
    """Gives a recipe file as a module."""
    spec = importlib.util.spec_from_file_location(f"tested_{recipe.stem}", recipe)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
