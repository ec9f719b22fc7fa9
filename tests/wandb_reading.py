# SPDX-License-Identifier: Apache-2.0
"""Reads what the W&B client left on disk, with the client's own command and none of the product."""

import functools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any


def segments(run: Path) -> list[Path]:
    """Gives the file of every process that logged in this run folder, oldest first."""
    return sorted((run / "wandb").glob("*run-*/run-*.wandb"))


def records(segment: Path, kind: str) -> list[dict[str, Any]]:
    """Gives the records of one kind ("run", "history", "config", "artifact", ...), in order."""
    lines = map(json.loads, _inspected(segment, segment.stat().st_size).splitlines())
    return [line[kind] for line in lines if line["type"] == kind]


@functools.cache  # the command takes a second to start
def _inspected(segment: Path, _num_bytes: int) -> str:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(segment)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def history(segment: Path) -> list[dict[str, Any]]:
    """Gives the rows in order, without the client's own columns except `_step`."""
    rows = [record["item"] for record in records(segment, "history")]
    return [
        {k: _number(v) for k, v in row.items() if k == "_step" or not k.startswith("_")}
        for row in rows
    ]


def config(segment: Path) -> dict[str, Any]:
    """Gives the config as it was in the end."""
    values: dict[str, Any] = {}
    for record in records(segment, "config"):
        values |= record.get("update", {})
    return {name: value for name, value in values.items() if name != "_wandb"}


def _number(value: Any) -> Any:
    """Numbers that JSON lacks come as text."""
    named = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    return named.get(value, value) if isinstance(value, str) else value
