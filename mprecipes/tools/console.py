# SPDX-License-Identifier: Apache-2.0
"""How every command of `mprecipes` prints: tables to stdout, or one JSON text."""

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mprecipes.observe.report import plain

PLAIN_WIDTH = 140  # columns where no terminal says how many it has
Json = Annotated[bool, typer.Option("--json", help="Print one JSON text instead of tables.")]


def out() -> Console:
    """Gives the console of stdout, wide where no terminal says how wide it is."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def print_json(value: Any) -> None:
    """Prints the one JSON text of a command called with `--json`; "nan" and "inf" are texts."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


def table_with(*columns: str, **options: Any) -> Table:
    """Gives an empty table of columns that wrap rather than cut."""
    table = Table(title_justify="left", **options)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def facts_table(title: str, facts: dict[str, Any]) -> Table:
    """Gives a table of names and values as they are; a dash where there is no value."""
    table = table_with("", "", title=escape(title), show_header=False)
    for name, value in facts.items():
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        table.add_row(escape(name), "-" if value is None or text == "" else escape(str(text)))
    return table


def size(num_bytes: int) -> str:
    """Gives a size as people read it, 1024 bytes to the KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024  # type: ignore[assignment]
    return f"{num_bytes} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
