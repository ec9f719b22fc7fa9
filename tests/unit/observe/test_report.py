# SPDX-License-Identifier: Apache-2.0
"""A report is written whole, again over itself, and nowhere it should not be."""

import json

import pytest

from mprecipes.errors import ConfigError
from mprecipes.observe.report import plain, write_report
from tests.stories import story


def test_everything_is_written(tmp_path):
    """HTML, Markdown, JSON and each picture that the Markdown names; a stranger's file stays."""
    (tmp_path / "mine.txt").write_text("mine")
    for _ in range(2):
        written = write_report(story(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.txt", "pictures", "report.html", "report.json", "report.md",
    ]  # fmt: skip
    text = written.markdown.read_text()
    assert len(written.pictures) == 6
    for path in written.pictures:
        assert f"(pictures/{path.name})" in text
        assert path.read_bytes().startswith(b"\x89PNG")
    assert json.loads(written.data.read_text()) == story().data


def test_a_place_that_is_a_file_is_refused(tmp_path):
    """The message names the folder and what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as refused:
        write_report(story(), tmp_path / "file")
    assert refused.value.found == "Not a directory (pictures)"
    assert refused.value.expected == "a folder that can be made and written"
    assert str(tmp_path / "file") in refused.value.where
    assert "--output_dir" in refused.value.action


def test_json_has_no_nan():
    """What is not finite is text, at any depth."""
    values = {"a": [1.0, float("nan")], 3: {"b": float("-inf")}, "c": (True, None, "x")}
    assert plain(values) == {"a": [1.0, "nan"], "3": {"b": "-inf"}, "c": [True, None, "x"]}
