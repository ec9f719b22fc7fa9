# SPDX-License-Identifier: Apache-2.0
"""The rows of one file: a text and its line, or a bad row and its reason; bad rows end nothing.

A text is never cast or repaired: what is not a string of valid Unicode in its place is a bad row.
Blank lines of JSONL are no rows, an empty text is one, a `.txt` file is one row; a byte order mark
is dropped.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


class BadRow(Exception):
    """A row without a usable text, or (at line 1) a file without rows."""

    def __init__(self, reason: str, found: str, line: int) -> None:
        super().__init__(found)
        self.reason, self.found, self.line = reason, found, line


Row = tuple[str, int] | BadRow  # text and physical line; in columnar files the row number, from 1


def read_rows(path: Path, format: str, text_field: str) -> Iterator[Row]:
    """Gives every row of a file in one of `FORMATS`; no error of a file or a row is raised."""
    num_rows = 0
    try:
        for row in FORMATS[format](path, text_field):
            num_rows += 1
            yield row
        if not num_rows:
            yield BadRow("empty file", f"{path.stat().st_size} bytes and no row", 1)
    except (OSError, pa.ArrowException) as error:
        yield BadRow("unreadable file", str(error).splitlines()[0], num_rows + 1)


def _read_txt(path: Path, _: str) -> Iterator[Row]:
    if raw := path.read_bytes():
        try:
            yield _decode(raw, 1).removeprefix("\ufeff"), 1
        except BadRow as bad:
            yield bad


def _read_jsonl(path: Path, text_field: str) -> Iterator[Row]:
    with open(path, "rb") as file:
        for line, raw in enumerate(file, start=1):
            if line == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if not raw.strip():
                continue
            try:
                yield _json_text(_decode(raw, line), text_field, line), line
            except BadRow as bad:
                yield bad


def _json_text(raw: str, text_field: str, line: int) -> str:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRow("broken JSON", str(error), line) from None
    if not isinstance(value, dict):
        raise BadRow("not a JSON object", f"a {type(value).__name__}", line)
    if text_field not in value:
        raise BadRow("missing text field", f"the fields {', '.join(value) or 'none'}", line)
    return _checked_text(value[text_field], line)


def _checked_text(value: Any, line: int) -> str:
    if not isinstance(value, str):
        raise BadRow("text is not a string", f"a value of type {type(value).__name__}", line)
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        raise BadRow("bad UTF-8", "half of a surrogate pair", line)
    return value


def _decode(raw: bytes, first_line: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        found = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise BadRow("bad UTF-8", found, line) from None


def _read_parquet(path: Path, text_field: str) -> Iterator[Row]:
    with pq.ParquetFile(path) as file:
        columns = [text_field] if text_field in file.schema_arrow.names else None
        yield from _read_batches(file.iter_batches(columns=columns), text_field)


def _read_arrow(path: Path, text_field: str) -> Iterator[Row]:
    with pa.memory_map(str(path)) as file:
        yield from _read_batches(pa.ipc.open_stream(file), text_field)


def _read_batches(batches: Iterator[pa.RecordBatch], text_field: str) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for value in _column(batch, text_field):
            number += 1
            if isinstance(value, BadRow):
                yield BadRow(value.reason, value.found, number)
                continue
            try:
                text = _decode(value, 0) if isinstance(value, bytes) else value
                yield _checked_text(text, number), number
            except BadRow as bad:
                yield BadRow(bad.reason, bad.found, number)


def _column(batch: pa.RecordBatch, text_field: str) -> list[Any]:
    """Gives each row's raw bytes (Arrow does not check UTF-8), None for a null, or a bad row."""
    names = batch.schema.names
    if text_field not in names:
        missing = BadRow("missing text field", f"the columns {', '.join(names)}", 0)
        return [missing] * batch.num_rows
    column = batch.column(names.index(text_field))
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        wrong = BadRow("text is not a string", f"a column of type {column.type}", 0)
        return [wrong] * batch.num_rows
    return column.cast(pa.large_binary()).to_pylist()


FORMATS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
    ".arrow": _read_arrow,
}
