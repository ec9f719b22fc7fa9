# SPDX-License-Identifier: Apache-2.0
"""What an SFT recipe would train on, before anything is trained: rows in colour, and all counts.

Reads the recipe's own `Config` and prepares the data as a launch would, in the same cache, so that
what is shown is what the model will be given. No model is built.
"""

import importlib.util
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from mprecipes.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[2]
TRAINED, CONTEXT, PADDING, PIECE = "bold green", "dim", "red", "cyan"


@dataclass(frozen=True)
class Preview:
    """What was found.

    Attributes:
        counts: by name, in the order they are shown.
        rows: of each row its pieces, as runs of (text, whether they are targets).
    """

    counts: dict[str, int | float | str]
    rows: list[list[list[tuple[str, bool]]]]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "counts": self.counts, "rows": self.rows}


def preview(recipe: Path, arguments: Sequence[str], *, num_rows: int = 2) -> Preview:
    """Prepares the data of a recipe's options and gives the counts and the first rows of a run.

    Args:
        arguments: `--config FILE` and further options of the recipe.

    Raises:
        ConfigError: the recipe has no conversations, or its options are refused.
        DataError: the data is.
    """
    from transformers import AutoTokenizer

    from mprecipes.compute.ranks import BatchPlan, Ranks
    from mprecipes.data.chats import read_chats
    from mprecipes.data.grouping import chat_order
    from mprecipes.identity.config import parse_config

    words = [*arguments]
    if "--output_dir" not in words:
        words += ["--output_dir", "nowhere"]  # nothing is written there
    config, _ = parse_config(_config_class(recipe), words)
    data = read_chats(config, Ranks(), should_stop=lambda: False)
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_dir)
    order = chat_order(data.train, config.seed, BatchPlan(1, 1, 1, 0))
    shown = order(0, min(num_rows, len(data.train))).tolist()
    rows = [_pieces(data.train[row], tokenizer) for row in shown]
    return Preview(_counts(data), rows)


def _config_class(recipe: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"preview_{recipe.stem}", recipe)
    if spec is None or spec.loader is None or not recipe.is_file():
        raise ConfigError(
            "no recipe file",
            expected="a recipe that trains on conversations",
            where=str(recipe),
            action="write: mprecipes preview recipes/sft_chat.py --config FILE.yaml",
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses resolve their annotations through it
    spec.loader.exec_module(module)
    if "chat" not in getattr(module, "Config", type).__dict__.get("__dataclass_fields__", {}):
        raise ConfigError(
            "a recipe without the option chat",
            expected="a recipe that trains on conversations",
            where=str(recipe),
            action="preview recipes/sft_chat.py or recipes/sft_lora.py, or a copy of one",
        )
    return module.Config


def _counts(data: Any) -> dict[str, int | float | str]:
    facts, train = data.facts, data.train
    positions = len(train) * train.seq_length if train.packed else facts["tokens"]
    counts: dict[str, int | float | str] = {
        "conversations": facts["num_conversations"],
        **{f"skipped: {reason}": count for reason, count in facts["skipped_rows"].items()},
        "longer than seq_length": facts["counts"].get("too_long", 0),
        "dropped": facts["counts"].get("dropped", 0),
        "pieces without targets": facts["counts"].get("without_targets", 0),
        "tokens cut off": facts["counts"].get("cut_tokens", 0),
        "turns without an end token": facts["counts"].get("unended_turns", 0),
        "rows of an epoch": len(train),
        "tokens of an epoch": facts["tokens"],
        "trained tokens of an epoch": facts["targets"],
        "trained share": round(facts["targets"] / facts["tokens"], 4),
        "filled share of rows": round(facts["tokens"] / positions, 4),
        "held-out rows": facts["heldout_sequences"],
        "held-out trained tokens": facts["heldout_targets"],
        "fingerprint": facts["fingerprint"][:16],
    }
    return counts


def _pieces(item: dict[str, Any], tokenizer: Any) -> list[list[tuple[str, bool]]]:
    columns = zip(*(item[name].tolist() for name in ("input_ids", "labels", "segment_ids")))
    found: list[list[tuple[str, bool]]] = []
    by_piece = itertools.groupby(columns, key=lambda column: column[2])
    for piece in (list(columns) for number, columns in by_piece if number >= 0):
        runs = itertools.groupby(piece, key=lambda column: column[1] != -100)
        texts = [(tokenizer.decode([each[0] for each in run]), mine) for mine, run in runs]
        found.append(texts)
    return found


def show(found: Preview, console: Console) -> None:
    """Prints rows with trained text green and context dim, pieces apart, and the counts."""
    for number, row in enumerate(found.rows, start=1):
        console.print(f"row {number}: {len(row)} conversations", style="bold")
        for piece in row:
            text = Text()
            for part, is_target in piece:
                text.append(part, style=TRAINED if is_target else CONTEXT)
            console.print(text)
            console.print("-" * 20, style=PIECE)
    width = max(map(len, found.counts))
    for name, value in found.counts.items():
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        console.print(f"{name:<{width}}  {shown}")


def preview_command(
    context: typer.Context,
    recipe: Annotated[
        Path, typer.Argument(help="An SFT recipe; options it does not know go to the recipe.")
    ] = CHECKOUT / "recipes" / "sft_chat.py",
    rows: Annotated[int, typer.Option("--rows", help="Rows to show.", min=0)] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON text.")] = False,
) -> None:
    """Show what would be trained on: rows with trained tokens in colour, and all counts."""
    arguments = [*context.args]
    if str(recipe).startswith("--"):  # options first: the recipe was left out
        arguments.insert(0, str(recipe))
        recipe = CHECKOUT / "recipes" / "sft_chat.py"
    found = preview(recipe, arguments, num_rows=rows)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        show(found, Console(highlight=False, soft_wrap=True))
