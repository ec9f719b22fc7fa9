# SPDX-License-Identifier: Apache-2.0
"""Rows as objects with their lines, from JSONL, Parquet and Arrow."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from mprecipes.data.objects import read_objects
from mprecipes.data.rows import BadRow


def told(rows):
    return [(row.reason, row.line) if isinstance(row, BadRow) else row for row in rows]


def test_jsonl_rows_and_bad_lines(tmp_path):
    """Blank lines count as lines and are no rows; each bad line has its reason."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n[]\n{"a": "\xff"}\n{"b": null, "c": [null]}\n'
    )
    assert told(read_objects(path, ".jsonl")) == [
        ({"a": 1}, 1),
        ("broken JSON", 3),
        ("not a JSON object", 4),
        ("bad UTF-8", 5),
        ({"c": [None]}, 6),
    ]


def test_lines_of_other_systems(tmp_path):
    """CRLF, a line separator of Unicode inside a text, no end of the last line."""
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"a": "x\u2028y"}\r\n\r\n{"a": 2}\r\n{"a": 3}'.encode())
    assert told(read_objects(path, ".jsonl")) == [
        ({"a": "x\u2028y"}, 1),
        ({"a": 2}, 3),
        ({"a": 3}, 4),
    ]


def test_a_field_given_twice_is_a_bad_row(tmp_path):
    """At any depth: one of the two would be lost."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1, "a": 2}\n{"m": [{"role": "x", "role": "y"}]}\n{"a": 1}\n')
    found = list(read_objects(path, ".jsonl"))
    assert told(found) == [("broken JSON", 1), ("broken JSON", 2), ({"a": 1}, 3)]
    assert found[1].found == "'role' is given twice"


def test_nulls_deep_inside_a_json_line_are_values(tmp_path):
    """A field of a row or of a message that is null is absent; what a message holds is its own."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"m": [{"content": null, "call": {"x": null}}], "n": null}\n')
    assert told(read_objects(path, ".jsonl")) == [({"m": [{"call": {"x": None}}]}, 1)]


def test_parquet_and_arrow_rows_without_the_nulls_of_others(tmp_path):
    """Keys that a columnar file fills with nulls are left out again."""
    rows = [
        {"messages": [{"role": "user", "content": "a", "tool_calls": None}]},
        {"messages": [{"role": "user", "content": None, "tool_calls": ["x"]}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    expected = [
        ({"messages": [{"role": "user", "content": "a"}]}, 1),
        ({"messages": [{"role": "user", "tool_calls": ["x"]}]}, 2),
    ]
    assert told(read_objects(tmp_path / "a.parquet", ".parquet")) == expected
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    [arrow] = (tmp_path / "saved").glob("*.arrow")
    assert told(read_objects(arrow, ".arrow")) == expected


def test_empty_and_unreadable_files(tmp_path):
    """Both are bad rows of line 1."""
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    assert told(read_objects(tmp_path / "a.jsonl", ".jsonl")) == [("empty file", 1)]
    assert told(read_objects(tmp_path / "a.parquet", ".parquet")) == [("unreadable file", 1)]
    assert told(read_objects(tmp_path / "none.jsonl", ".jsonl")) == [("unreadable file", 1)]
