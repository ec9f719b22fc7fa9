# SPDX-License-Identifier: Apache-2.0
"""Small files are whole or absent, and digests are of one canonical text."""

import errno
import json
import os

import pytest

from mprecipes.identity.files import (
    canonical_json,
    fsync_directory,
    remove_unfinished,
    sha256_file,
    write_atomically,
    write_json_atomically,
)


def test_canonical_json_is_one_text():
    """Order of names, spaces and non-ASCII letters do not change the text of a value."""
    assert canonical_json({"b": [1, 2.5], "a": "\u00e9"}) == b'{"a":"\\u00e9","b":[1,2.5]}'
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_canonical_json_refuses_what_json_cannot_say(value):
    """A number that JSON has no text for is refused, not written as NaN."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"loss": value})


def test_write_replaces_and_leaves_nothing_else(tmp_path):
    """After a write the file holds the new bytes and the folder holds only that file."""
    path = tmp_path / "run.json"
    path.write_bytes(b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["run.json"]


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    """A disk that fails at fsync leaves the old content and no temporary file."""
    path = tmp_path / "run.json"
    path.write_bytes(b"old")

    def broken(descriptor):
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="planted"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["run.json"]


def test_two_writers_of_one_path_keep_apart(tmp_path, monkeypatch):
    """A write inside another with the same process id: both succeed, and the later one stands."""
    path, real = tmp_path / "digests.json", os.fsync

    def fsync(descriptor):
        monkeypatch.setattr(os, "fsync", real)
        write_atomically(path, b"inner")
        assert path.read_bytes() == b"inner"
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(path, b"outer")
    assert path.read_bytes() == b"outer"
    assert os.listdir(tmp_path) == ["digests.json"]


def test_what_a_killed_writer_left_is_removed(tmp_path):
    """Only our own temporary files go, and a folder that is not there is no error."""
    for name in (".run.json.17-0f.tmp", ".run.json.17.tmp", "run.json", ".hidden", "notes.tmp"):
        (tmp_path / name).write_bytes(b"x")
    remove_unfinished(tmp_path)
    remove_unfinished(tmp_path / "absent")
    assert sorted(os.listdir(tmp_path)) == [".hidden", "notes.tmp", "run.json"]


def test_json_file_reads_back_and_ends_with_a_newline(tmp_path):
    """What is written as JSON reads back equal, in the order of its names."""
    write_json_atomically(tmp_path / "a.json", {"b": 1, "a": [None, 0.1]})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert list(json.loads(text).items()) == [("b", 1), ("a", [None, 0.1])]
    assert text.endswith("}\n")


def test_sha256_of_known_bytes(tmp_path):
    """The digest is plain SHA-256, also of an empty file and over more than one chunk."""
    (tmp_path / "abc").write_bytes(b"abc")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "long").write_bytes(b"a" * 1_000_000 * 2)
    assert sha256_file(tmp_path / "abc") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert sha256_file(tmp_path / "empty") == (
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )
    assert sha256_file(tmp_path / "long") == (
        "bcf7f9d1b4311c3352e60502255ce09a6744df84e8f2c89f79c4b5d74933a95a"
    )


def test_fsync_directory_takes_only_folders(tmp_path):
    """A file in place of a folder is an error, not a silent nothing."""
    fsync_directory(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        fsync_directory(tmp_path / "file")
