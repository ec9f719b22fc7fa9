# SPDX-License-Identifier: Apache-2.0
"""Sources of text: what they are found to be, their order, digest and refusals."""

import json
import os

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mprecipes.data.corpus import Document, open_corpus
from mprecipes.errors import ConfigError, DataError


def write_jsonl(path, *texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(corpus):
    return [document.text for document in corpus]


def test_stdlib_is_python_source_without_tests(tmp_path):
    """The embedded corpus is this interpreter's own library, sorted, and always the same."""
    corpus = open_corpus("stdlib")
    names = [shown for shown, _, _ in corpus.files]
    assert names == sorted(names)
    assert "stdlib/json/decoder.py" in names
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "site-packages", "idlelib", "ensurepip", "__pycache__"}
    first = next(iter(corpus))
    assert first.where == "stdlib/__future__.py:1"
    num_used = len(texts_of(corpus))
    assert num_used + corpus.skipped.total() == len(names)
    assert num_used > 400
    assert corpus.content_digest == open_corpus("stdlib").content_digest


def test_a_file_gives_documents_with_their_lines(tmp_path):
    """Every document says where it stands, by the path as it was given."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert list(open_corpus(str(path))) == [Document("a", f"{path}:1"), Document("b", f"{path}:3")]


def test_a_folder_is_read_by_relative_path(tmp_path):
    """All types are mixed in one canonical order; hidden and other files are left alone."""
    write_jsonl(tmp_path / "b.jsonl", "third", "fourth")
    write_jsonl(tmp_path / "a" / "x.jsonl", "first")
    (tmp_path / "a.txt").write_text("second")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "README.md").write_text("no")
    pq.write_table(pa.table({"text": ["fifth"]}), tmp_path / "c.parquet")
    corpus = open_corpus(tmp_path)
    assert texts_of(corpus) == ["second", "first", "third", "fourth", "fifth"]
    assert [f[0] for f in corpus.files] == [
        str(tmp_path / name) for name in ("a.txt", "a/x.jsonl", "b.jsonl", "c.parquet")
    ]


def test_saved_data_sets_are_read_in_row_order(tmp_path):
    """A folder of `save_to_disk` is read from its own files; of a dictionary the split train."""
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
    rows.save_to_disk(tmp_path / "one")
    other = datasets.Dataset.from_dict({"text": ["z"]})
    datasets.DatasetDict({"train": rows, "test": other}).save_to_disk(tmp_path / "two")
    one, two = open_corpus(tmp_path / "one"), open_corpus(tmp_path / "two")
    assert (texts_of(one), texts_of(two)) == (["a", "b", "c"], ["a", "b", "c"])
    assert one.kind == two.kind == "saved data set"
    assert one.content_digest == two.content_digest


def test_a_saved_dictionary_without_train_is_refused(tmp_path):
    """Which split to train on is never guessed."""
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"dev": rows, "test": rows}).save_to_disk(tmp_path)
    with pytest.raises(DataError) as caught:
        open_corpus(tmp_path)
    error = caught.value
    assert error.found == "the splits dev, test"
    assert "train" in error.expected
    assert error.where == str(tmp_path)
    assert error.action.endswith(str(tmp_path / "dev"))


def test_a_bad_row_is_refused_with_file_and_line(tmp_path):
    """The default stops at the first bad row and says everything needed to correct it."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": 5}\n')
    with pytest.raises(DataError) as caught:
        texts_of(open_corpus(path))
    error = caught.value
    assert error.found == "text is not a string: a value of type int"
    assert error.expected == "a string of valid UTF-8 as the row's 'text'"
    assert error.where == f"{path}:3"
    assert "--on_bad_rows skip" in error.action
    assert error.exit_code == 2


def test_skipped_rows_are_counted_by_reason_and_afresh(tmp_path):
    """Used and skipped rows add up, also in the second iteration."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": 5}\n{"text"\n{"text": "d"}\n{"text": []}\n')
    corpus = open_corpus(path, on_bad_rows="skip")
    for _ in range(2):
        assert texts_of(corpus) == ["a", "d"]
        assert corpus.skipped == {"text is not a string": 2, "broken JSON": 1}


@pytest.mark.parametrize(
    ("name", "found"),
    [("gone.jsonl", "no such file"), ("notes.pdf", "a file of type '.pdf'"), ("empty", "a folder")],
)
def test_a_missing_or_foreign_source_is_refused(tmp_path, name, found):
    """A wrong path, a wrong type and a folder without data each say what would be right."""
    (tmp_path / "notes.pdf").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        open_corpus(str(tmp_path / name))
    error = caught.value
    assert error.found.startswith(found)
    assert ".jsonl" in error.expected
    assert error.where == str(tmp_path / name)
    assert "convert" in error.action


def test_a_hub_id_without_network_is_refused(monkeypatch):
    """What is no path is asked for at the hub, and an unreachable hub is an error of the data."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as caught:
        open_corpus("nobody/nothing-here")
    error = caught.value
    assert "the hub did not give it" in error.found
    assert "existing path" in error.expected
    assert error.where == "source nobody/nothing-here"
    assert "local path" in error.action


def test_an_unknown_policy_is_refused(tmp_path):
    """A misspelt policy is not taken for the default."""
    with pytest.raises(ConfigError) as caught:
        open_corpus("stdlib", on_bad_rows="ignore")
    error = caught.value
    assert (error.found, error.expected) == ("on_bad_rows 'ignore'", "refuse or skip")
    assert (error.where, error.action.count("--on_bad_rows")) == ("on_bad_rows", 2)


def test_the_digest_follows_content_alone(tmp_path):
    """A copy elsewhere with another time has the same digest; one other byte has another."""
    one, two, three = (tmp_path / name / "rows.jsonl" for name in ("one", "two", "three"))
    write_jsonl(one, "a", "b")
    write_jsonl(two, "a", "b")
    write_jsonl(three, "a", "c")
    os.utime(two, (1, 1))
    digests = [open_corpus(path.parent).content_digest for path in (one, two, three)]
    assert digests[0] == digests[1] != digests[2]
    (two.parent / "rows.jsonl").rename(two.parent / "other.jsonl")
    assert open_corpus(two.parent).content_digest == digests[0]


def test_a_file_that_changed_since_the_corpus_was_opened_is_named(tmp_path):
    """A file written to, replaced by one of the same size and time, or gone; others are not."""
    paths = [write_jsonl(tmp_path / name / f"{name}.jsonl", name) for name in "abcd"]
    corpus = open_corpus(tmp_path)
    assert (len(texts_of(corpus)), len(corpus.content_digest)) == (4, 64)
    corpus.require_unchanged()

    def where():
        with pytest.raises(DataError) as caught:
            corpus.require_unchanged()
        error = caught.value
        assert error.found == "files that changed while they were read"
        assert "stays as it is" in error.expected
        assert "launch again" in error.action
        return error.where

    stat, other = paths[3].stat(), write_jsonl(tmp_path / "new", "D")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(other, paths[3])
    now = paths[3].stat()
    assert (now.st_size, now.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert where() == str(paths[3])
    paths[2].unlink()
    assert where() == f"{paths[2]} and 1 more"
    write_jsonl(paths[1], "longer")
    assert where() == f"{paths[1]} and 2 more"
    open_corpus(tmp_path).require_unchanged()


def test_the_digest_of_a_large_file_is_remembered_until_it_changes(tmp_path):
    """A settled large file is hashed once; the same length and time with another byte is seen."""
    path, memory = tmp_path / "big.txt", tmp_path / "cache" / "digests.json"
    path.write_bytes(b"a" * (1 << 20))
    os.utime(path, (1, 1))
    young = open_corpus(path, digest_cache=memory).content_digest
    assert not memory.exists()  # its inode changed just now: it may change again unseen
    stat = path.stat()
    times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
    memory.parent.mkdir()
    stamp = f"{path.resolve()} {stat.st_ino} {times} {stat.st_size}"
    memory.write_text(json.dumps({stamp: f"{1 << 20} remembered"}))
    assert open_corpus(path, digest_cache=memory).content_digest != young
    path.write_bytes(b"b" + b"a" * ((1 << 20) - 1))
    os.utime(path, (1, 1))
    changed = open_corpus(path, digest_cache=memory).content_digest
    path.write_bytes(b"a" * (1 << 20))
    assert changed != young == open_corpus(path, digest_cache=memory).content_digest


@pytest.mark.parametrize(
    "damaged",
    [b'{"/data/a.txt 1 2 3 4": "4 0f', b"", b"\xff", b"[]", b'"text"', b'{"a": 5}', b'{"a": null}'],
)
def test_a_damaged_memory_of_digests_is_replaced(tmp_path, capsys, damaged):
    """Cut short, of another form or with other values: said, hashed anew, and written afresh."""
    source, memory = write_jsonl(tmp_path / "rows.jsonl", "a"), tmp_path / "digests.json"
    memory.write_bytes(damaged)
    found = open_corpus(source, digest_cache=memory).content_digest
    assert f"hashing large files anew: {memory}: " in capsys.readouterr().err
    assert found == open_corpus(source).content_digest
    assert json.loads(memory.read_text()) == {}
    open_corpus(source, digest_cache=memory).content_digest  # noqa: B018 - computed when asked for
    assert capsys.readouterr().err == ""
