# SPDX-License-Identifier: Apache-2.0
"""What would be trained on, before it is: rows with their trained text, and the counts."""

import io
import json

import pytest
import typer.testing
from rich.console import Console

from mprecipes.errors import ConfigError
from mprecipes.tools import cli
from mprecipes.tools.preview import preview, show
from tests.sft import CHAT, LORA, ROOT, options, write_chats


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.setenv("MPRECIPES_CACHE", str(tmp_path / "cache"))
    return options(write_chats(tmp_path / "rows.jsonl"), None, eval_fraction=0.1)


def test_rows_and_counts(words):
    """Trained text is what the assistant said and its end; the counts add up."""
    found = preview(CHAT, words, num_rows=3)
    assert len(found.rows) == 3
    pieces = [piece for row in found.rows for piece in row]
    for piece in pieces:
        assert [is_target for _, is_target in piece] == [False, True, False]
        assert piece[0][0].endswith("assistant:\n")
        assert piece[1][0].endswith("<|endoftext|>")
    counts = found.counts
    assert counts["conversations"] == 48
    assert (counts["dropped"], counts["longer than seq_length"]) == (0, 0)
    assert counts["trained share"] == round(
        counts["trained tokens of an epoch"] / counts["tokens of an epoch"], 4
    )
    assert 0.5 < counts["filled share of rows"] <= 1


def test_trained_text_is_in_colour(words):
    """On a terminal, trained text is bold green, the rest is dim."""
    out = io.StringIO()
    show(preview(LORA, words, num_rows=1), Console(file=out, force_terminal=True, width=100))
    assert "\x1b[1;32m" in out.getvalue()
    assert "\x1b[2muser:" in out.getvalue()


def test_the_command(words):
    """The recipe may be left out; --json is one text."""
    done = typer.testing.CliRunner().invoke(cli.app, ["preview", *words, "--rows", "1", "--json"])
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert (value["schema"], len(value["rows"])) == (1, 1)
    done = typer.testing.CliRunner().invoke(cli.app, ["preview", str(LORA), *words, "--rows", "0"])
    assert "trained tokens of an epoch" in done.stdout


def test_what_is_no_sft_recipe_is_refused(words, tmp_path):
    """A file that is not there, and a recipe without conversations."""
    for recipe, found in (
        (tmp_path / "none.py", "no recipe file"),
        (ROOT / "recipes" / "pretrain_causal_lm.py", "a recipe without the option chat"),
    ):
        with pytest.raises(ConfigError) as error:
            preview(recipe, words)
        assert error.value.found == found
        assert error.value.expected == "a recipe that trains on conversations"
        assert error.value.where == str(recipe)
        assert "preview" in error.value.action
