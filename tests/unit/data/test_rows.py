# SPDX-License-Identifier: Apache-2.0
"""Reading files row by row, good and bad."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mprecipes.data.rows import BadRow, read_rows


def rows_of(path, format=None):
    return [
        (row.reason, row.line) if isinstance(row, BadRow) else row
        for row in read_rows(path, format or path.suffix, "text")
    ]


def test_jsonl_names_the_physical_line_of_every_bad_row(tmp_path):
    """Blank lines are counted but are no rows, and reading goes on behind each kind of bad row."""
    path = tmp_path / "rows.jsonl"
    lines = [b'{"text": "a"}', b"", b'{"text": "b"', b"[]", b'{"text": 5}', b'{"body": "x"}']
    lines += [b'{"text": "\xff"}', b'{"text": null}', b'{"text": "\\ud800"}', b'{"text": "z"}']
    path.write_bytes(b"\n".join(lines))
    assert rows_of(path) == [
        ("a", 1),
        ("broken JSON", 3),
        ("not a JSON object", 4),
        ("text is not a string", 5),
        ("missing text field", 6),
        ("bad UTF-8", 7),
        ("text is not a string", 8),
        ("bad UTF-8", 9),
        ("z", 10),
    ]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"text": ' + "9" * 5000 + "}"])
def test_jsonl_survives_json_that_python_refuses_to_parse(tmp_path, text):
    """Too deep nesting and too long numbers are broken rows, not a crash."""
    path = tmp_path / "rows.jsonl"
    path.write_text(text + "\n")
    assert rows_of(path) == [("broken JSON", 1)]


def test_jsonl_accepts_windows_files(tmp_path):
    """A byte order mark and carriage returns are no part of the text, and empty text is a row."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": ""}\r\n')
    assert rows_of(path) == [("a", 1), ("", 3)]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_jsonl_file_without_rows_is_bad(tmp_path, content):
    """Neither zero bytes nor blank lines pass as data."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert rows_of(path) == [("empty file", 1)]


def test_txt_is_one_row_and_names_the_line_of_a_bad_byte(tmp_path):
    """A text file keeps its bytes; invalid UTF-8 is named with its line."""
    good, bad, empty = (tmp_path / name for name in ("good.txt", "bad.txt", "empty.txt"))
    good.write_bytes(b"one\r\ntwo\n")
    bad.write_bytes(b"one\ntwo\nthr\xff")
    empty.write_bytes(b"")
    assert rows_of(good) == [("one\r\ntwo\n", 1)]
    assert rows_of(bad) == [("bad UTF-8", 3)]
    assert rows_of(empty) == [("empty file", 1)]


def test_parquet_names_the_row(tmp_path):
    """A null and invalid UTF-8, which Arrow does not check, are bad rows by number from 1."""
    path = tmp_path / "rows.parquet"
    raw = pa.array([b"a", None, b"\xff", b"d"], pa.binary())
    text = pa.StringArray.from_buffers(4, *raw.buffers()[1:], raw.buffers()[0])
    pq.write_table(pa.table({"n": [1, 2, 3, 4], "text": text}), path)
    expected = [("a", 1), ("text is not a string", 2), ("bad UTF-8", 3), ("d", 4)]
    assert rows_of(path) == expected


def test_parquet_reads_dictionary_columns(tmp_path):
    """A dictionary-encoded string column is text like any other."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}), path)
    assert rows_of(path) == [("a", 1), ("b", 2), ("a", 3)]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"text": [1, 2]}, [("text is not a string", 1), ("text is not a string", 2)]),
        ({"body": ["a"]}, [("missing text field", 1)]),
        ({"text": pa.array([], pa.string())}, [("empty file", 1)]),
    ],
)
def test_parquet_never_casts(tmp_path, table, expected):
    """A column of numbers, another column and no row at all give bad rows, never text."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table(table), path)
    assert rows_of(path) == expected


def test_a_file_that_is_no_parquet_is_unreadable(tmp_path):
    """A damaged columnar file is one bad row, not a traceback of the library."""
    path = tmp_path / "rows.parquet"
    path.write_text(json.dumps({"text": "a"}))
    assert rows_of(path) == [("unreadable file", 1)]


def test_a_vanished_file_is_unreadable(tmp_path):
    """A file that cannot be opened is a bad row with the system's message."""
    (row,) = read_rows(tmp_path / "gone.txt", ".txt", "text")
    assert isinstance(row, BadRow)
    assert (row.reason, row.line) == ("unreadable file", 1)
    assert "No such file" in row.found
