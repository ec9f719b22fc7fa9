# SPDX-License-Identifier: Apache-2.0
"""Records the golden traces of the SFT recipes, like `regenerate`; part of `make golden`.

Ten FP32 steps each over generated chats: `traces/<recipe>-<major>-fp32.json`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from mprecipes.identity.recipe import read_recipe
from tests.golden.regenerate import TRACES, made_with, show_difference
from tests.launching import launch
from tests.reading import journal
from tests.sft import CHAT, LORA, options, write_chats

CASES: dict[Path, dict[str, Any]] = {
    CHAT: {"chat": {"batching": "grouped"}, "tuning": {"neftune_noise_alpha": 5.0}},
    LORA: {"lora": {"r": 4, "lora_dropout": 0.1}, "tuning": {"label_smoothing_factor": 0.1}},
}


def sft_trace_path(recipe: Path) -> Path:
    found = read_recipe(recipe)
    return TRACES / f"{found.name}-{found.major}-fp32.json"


def record_sft(recipe: Path, folder: Path) -> dict[str, Any]:
    """Launches ten steps and gives their trace."""
    data = write_chats(folder / "chats.jsonl")
    words = options(data, folder / "run", precision="fp32", max_steps=10, **CASES[recipe])
    done = launch(recipe, words)
    assert done.returncode == 0, done.output
    lines = journal(folder / "run").values()
    return {
        "recipe": read_recipe(recipe).name,
        "major": read_recipe(recipe).major,
        "precision": "fp32",
        "made_with": made_with(),
        "batch_digest": [line["batch_digest"] for line in lines],
        "loss": [float(line["loss"]).hex() for line in lines],
        "grad_norm": [float(line["grad_norm"]).hex() for line in lines],
    }


def main() -> None:
    for recipe in CASES:
        path = sft_trace_path(recipe)
        old = json.loads(path.read_text()) if path.exists() else None
        with tempfile.TemporaryDirectory() as folder:
            new = record_sft(recipe, Path(folder))
        print(f"{path.name}: {'unchanged' if old == new else 'new' if old is None else 'changed'}")
        if old is not None:
            show_difference(old, new)
        path.write_text(json.dumps(new, indent=1) + "\n")


if __name__ == "__main__":
    main()
