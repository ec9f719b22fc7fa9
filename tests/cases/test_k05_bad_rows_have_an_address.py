# SPDX-License-Identifier: Apache-2.0
"""Case K05 (NVIDIA-NeMo/Automodel#1694; microsoft/graphrag#2424; wandb/rai-toolkit#82): a malformed
line failed without file and line, or took its whole file with it."""

import pytest

from mprecipes.compute.ranks import Ranks
from mprecipes.data.packing import prepare_data
from mprecipes.errors import DataError

LINES = [b'{"text": "aaa"}', b"", b'{"text": "b"', b'{"text": "ccc"}', b"[]", b'{"text": 5}']


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\n".join(LINES))
    (folder / "b.jsonl").write_bytes(b"")
    (folder / "c.jsonl").write_bytes(b'{"text": "ddd"}\n{"text": "\xff\xfe"}\n')
    return folder


def prepare(source, **changes):
    options = {"seq_length": 4, "ranks": Ranks(), "cache_dir": source.parent / "cache"}
    return prepare_data(source=str(source), **(options | changes))


def test_the_default_refuses_with_file_and_physical_line(source):
    """The cut line is named as line 3, the blank one counted, and no cache entry is left."""
    with pytest.raises(DataError) as caught:
        prepare(source)
    error = caught.value
    assert error.exit_code == 2
    assert error.found.startswith("broken JSON")
    assert "valid UTF-8" in error.expected
    assert error.where == f"{source / 'a.jsonl'}:3"
    assert "--on_bad_rows skip" in error.action
    left = [p for p in (source.parent / "cache" / "packed").iterdir() if p.suffix != ".lock"]
    assert [p.name[:6] for p in left] == [".lock-"]


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b'{"text": "a"}\n\n[]\n', 3, "not a JSON object"),
        (b'{"text": 5}\n', 1, "text is not a string"),
        (b"", 1, "empty file"),
        (b'\n{"text": "\xff"}\n', 2, "bad UTF-8"),
        (b'{"body": "a"}\n', 1, "missing text field"),
    ],
)
def test_every_kind_of_bad_row_is_named(tmp_path, content, line, reason):
    """Each kind is refused at its own line with its own reason."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare(path)
    assert caught.value.where == f"{path}:{line}"
    assert caught.value.found.startswith(reason)


def test_skipping_counts_what_it_skips(source):
    """Of 7 rows and an empty file, 3 rows are used and 5 skips counted; the number 5 is no text."""
    prepared = prepare(source, on_bad_rows="skip")
    rows = [bytes(prepared.train[i]["input_ids"][:3].tolist()) for i in range(len(prepared.train))]
    assert rows == [b"aaa", b"ccc", b"ddd"]
    assert prepared.facts["num_documents"] == 3
    assert prepared.facts["skipped_rows"] == {
        "bad UTF-8": 1,
        "broken JSON": 1,
        "empty file": 1,
        "not a JSON object": 1,
        "text is not a string": 1,
    }
