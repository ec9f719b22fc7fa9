# SPDX-License-Identifier: Apache-2.0
"""Tables, sizes and JSON come out as people and programs read them."""

import json

import pytest

from mprecipes.tools.console import facts_table, out, print_json, size, table_with


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_sizes(num_bytes, text):
    """1024 to the unit, the largest is GiB."""
    assert size(num_bytes) == text


def test_tables_are_wide_where_there_is_no_terminal(capsys):
    """A column of 100 characters is not folded; None and an empty text are a dash."""
    table = table_with("a", "b")
    table.add_row("x" * 100, "y")
    out().print(table)
    out().print(facts_table("facts", {"none": None, "empty": "", "list": [1, 2], "[b]": "[b]"}))
    text = capsys.readouterr().out
    assert "x" * 100 in text
    assert "1, 2" in text and "[b]" in text
    assert text.count("-  ") >= 2


def test_a_title_is_printed_as_it_is(capsys):
    """A path in square brackets is text, neither a style nor an error."""
    out().print(facts_table("runs/a[/b]", {"[v1] x": 1}))
    text = capsys.readouterr().out
    assert "runs/a[/b]" in text and "[v1] x" in text


def test_json_is_alone_on_stdout(capsys):
    """It reads back."""
    print_json({"a": [1]})
    assert json.loads(capsys.readouterr().out) == {"a": [1]}


def test_json_is_strict(capsys):
    """What is not finite is a text: NaN and Infinity are no JSON."""
    print_json({"loss": [float("nan"), 1.5], "rate": float("inf")})
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail) == {"loss": ["nan", 1.5], "rate": "inf"}
