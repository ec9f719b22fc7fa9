# SPDX-License-Identifier: Apache-2.0
"""The rows of one file as objects with their lines, or bad rows and reasons; nothing is cast.

The kinds of file and of bad row are those of `rows`. A field of a row or a message that is null is
left out; in columnar files also deeper inside, as they fill rows of different shape with nulls.
"""

import codecs
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mprecipes.data.rows import BadRow

Object = tuple[dict[str, Any], int] | BadRow
_MESSAGE_DEPTH = 3  # row, list, message


def read_objects(path: Path, format: str) -> Iterator[Object]:
    """Gives every row of a .jsonl, .parquet or .arrow file; no error of a file or row is raised."""
    num_rows = 0
    try:
        for row in _jsonl(path) if format == ".jsonl" else _columnar(path, format):
            num_rows += 1
            yield row
        if not num_rows:
            yield BadRow("empty file", f"{path.stat().st_size} bytes and no row", 1)
    except (OSError, pa.ArrowException) as error:
        yield BadRow("unreadable file", str(error).splitlines()[0], num_rows + 1)


def _jsonl(path: Path) -> Iterator[Object]:
    with open(path, "rb") as file:
        for line, raw in enumerate(file, start=1):
            text = raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
            if not text.strip():
                continue
            try:
                value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
            except UnicodeDecodeError as error:
                found = f"byte 0x{text[error.start]:02x} at offset {error.start}"
                yield BadRow("bad UTF-8", found, line)
            except (ValueError, RecursionError) as error:
                yield BadRow("broken JSON", str(error), line)
            else:
                yield _checked(value, line, _MESSAGE_DEPTH)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Gives an object; a field given twice would lose one of them without a word."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is given twice")
    return value


def _columnar(path: Path, format: str) -> Iterator[Object]:
    if format == ".parquet":
        with pq.ParquetFile(path) as file:
            yield from _batches(file.iter_batches())
    else:
        with pa.memory_map(str(path)) as mapped:
            yield from _batches(pa.ipc.open_stream(mapped))


def _batches(batches: Iterator[pa.RecordBatch]) -> Iterator[Object]:
    number = 0
    for batch in batches:
        for index in range(batch.num_rows):
            number += 1
            try:
                yield _checked(batch.slice(index, 1).to_pylist()[0], number)
            except UnicodeDecodeError as error:
                yield BadRow("bad UTF-8", f"byte at offset {error.start}", number)


def _checked(value: Any, line: int, depth: float = math.inf) -> Object:
    if not isinstance(value, dict):
        return BadRow("not a JSON object", f"a {type(value).__name__}", line)
    return _without_nulls(value, depth), line


def _without_nulls(value: Any, depth: float) -> Any:
    """Leaves out fields that are null, down to `depth` values inside each other."""
    if not depth:
        return value
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if each is not None}
        return {key: _without_nulls(each, depth - 1) for key, each in kept.items()}
    if isinstance(value, list):
        return [_without_nulls(each, depth - 1) for each in value]
    return value
