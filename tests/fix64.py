# SPDX-License-Identifier: Apache-2.0
"""FIX-64: 64 rows of 16 tokens, row i carries id i; and the options of a tiny run over them."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "pretrain_causal_lm.py"
SPY = ROOT / "tests" / "spy_recipe.py"

MODEL = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 16, "attention_dropout": 0.1, "tie_word_embeddings": True,
}  # fmt: skip


def write_rows(path: Path, count: int = 64) -> Path:
    """Writes `count` JSON rows of 15 ASCII characters: with the end token, one packed row each."""
    lines = [json.dumps({"text": f"r{i:02d} {(i * 7919) % 10**11:011d}"}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="ascii")
    return path


def options(data: Path, output_dir: Path, **changed: object) -> list[str]:
    """Gives the command line of a tiny run; `name=None` is `--name none`."""
    values: dict[str, object] = {
        "dataset": data, "seq_length": 16, "eval_fraction": None, "model_config": json.dumps(MODEL),
        "per_device_train_batch_size": 4, "max_steps": 10, "warmup_steps": 2, "learning_rate": 1e-3,
        "save_steps": 5, "keep_last": 3, "logging_steps": 5, "output_dir": output_dir,
        "checkpoint": json.dumps({"synchronous": True}),  # a step that has ended is on the disk
        **changed,
    }  # fmt: skip
    words: list[str] = []
    for name, value in values.items():
        text = "none" if value is None else str(value)
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [text])]
    return words
