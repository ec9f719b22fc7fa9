# SPDX-License-Identifier: Apache-2.0
"""Cache entries: whole or absent, checked when opened, one builder at a time."""

import errno
import os

import pytest

from mprecipes.data import cache
from mprecipes.data.cache import building, default_cache_dir, locked, open_entry
from mprecipes.errors import DataError, Preempted


def build(entry, content=b"abc"):
    with building(entry, {"n": 1}) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "rows.bin").write_bytes(content)
    return entry


def test_an_entry_appears_whole(tmp_path):
    """Nothing stands under the entry's name until the block has ended, then all of it does."""
    entry = tmp_path / "e"
    with building(entry, facts := {}) as folder:
        (folder / "rows.bin").write_bytes(b"abc")
        assert not entry.exists()
        facts["n"] = 2
    assert open_entry(entry) == {"n": 2}
    assert sorted(p.name for p in entry.iterdir()) == ["manifest.json", "rows.bin"]
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


@pytest.mark.parametrize("point", ["data.before_manifest", "data.before_publish"])
def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch, point):
    """A disk that fails before the rename leaves no entry and no half of one."""
    monkeypatch.setenv("MPRECIPES_FAULT", f"enospc@{point}")
    with pytest.raises(DataError) as caught:
        build(tmp_path / "e")
    assert caught.value.found == f"OSError: planted fault at {point}"
    assert "has room" in caught.value.expected and caught.value.where == str(tmp_path)
    assert caught.value.action == "set MPRECIPES_CACHE to such a folder"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOLCK])
def test_a_cache_that_cannot_be_locked_is_named(tmp_path, monkeypatch, number):
    """A home that cannot be written, and a file system without locks: not a traceback."""

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(
        *((cache.fcntl, "flock") if number == errno.ENOLCK else (cache.Path, "mkdir")), refuse
    )
    with (
        pytest.raises(DataError) as caught,
        locked(tmp_path / "e", wait_seconds=1.0, should_stop=lambda: False),
    ):
        pytest.fail("there is no lock")
    assert os.strerror(number) in caught.value.found
    assert caught.value.where == str(tmp_path) and "MPRECIPES_CACHE" in caught.value.action


def test_what_a_killed_build_left_is_swept(tmp_path):
    """The next build of the same entry removes the folder of a killed one, and only that."""
    (tmp_path / ".building-e-dead").mkdir()
    (tmp_path / ".building-other-live").mkdir()
    build(tmp_path / "e")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".building-other-live", "e"]


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda p: p.write_bytes(b"ab"), "2 bytes"),
        (lambda p: p.write_bytes(b"abd"), "SHA-256"),
        (lambda p: p.unlink(), "no file"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, found):
    """Another length, another content with a new time and a missing file are all seen."""
    entry = build(tmp_path / "e")
    damage(entry / "sub" / "rows.bin")
    os.utime(entry / "sub", (1, 1))
    if (entry / "sub" / "rows.bin").exists():
        os.utime(entry / "sub" / "rows.bin", (1, 1))
    with pytest.raises(DataError) as caught:
        open_entry(entry)
    error = caught.value
    assert error.found.startswith(found)
    assert "3 bytes" in error.expected or "ba7816bf" in error.expected
    assert error.where == str(entry / "sub" / "rows.bin")
    assert "prepares it again" in error.action


def test_a_flipped_bit_under_the_same_time_is_seen_by_verify(tmp_path):
    """Opening trusts size and time; `verify` trusts nothing."""
    entry = build(tmp_path / "e")
    path = entry / "sub" / "rows.bin"
    times = path.stat()
    path.write_bytes(b"abb")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert open_entry(entry) == {"n": 1}
    with pytest.raises(DataError, match="SHA-256"):
        open_entry(entry, verify=True)


def test_a_copied_entry_is_verified_once(tmp_path):
    """A sound file with another time passes its SHA-256 and gets the recorded time back."""
    entry = build(tmp_path / "e")
    path = entry / "sub" / "rows.bin"
    recorded = path.stat().st_mtime_ns
    os.utime(path, (1, 1))
    open_entry(entry)
    assert path.stat().st_mtime_ns == recorded


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"root_sha256": "0", "files": [], "facts": {}}'])
def test_a_damaged_manifest_is_refused(tmp_path, text):
    """A manifest that is torn, foreign or altered is no manifest."""
    entry = build(tmp_path / "e")
    (entry / "manifest.json").write_text(text)
    with pytest.raises(DataError) as caught:
        open_entry(entry)
    assert "manifest" in caught.value.found
    assert caught.value.where == str(entry / "manifest.json")


def test_a_second_builder_waits_and_gives_up(tmp_path):
    """While one holder has the lock another one gets an error that names the file, in time."""
    entry, never = tmp_path / "e", lambda: False
    with locked(entry, wait_seconds=0, should_stop=never):
        with pytest.raises(DataError) as caught, locked(entry, wait_seconds=0, should_stop=never):
            raise AssertionError("both hold the lock")
    error = caught.value
    assert "another process has been preparing" in error.found
    assert error.expected == "the other preparation to finish"
    assert error.where == str(tmp_path / ".lock-e")
    assert "launch again" in error.action
    with locked(entry, wait_seconds=0, should_stop=never):
        pass


def test_waiting_ends_when_a_stop_is_asked_for(tmp_path):
    """A preempted job does not sit in the queue for a lock; it says to be launched again."""
    entry = tmp_path / "e"
    with locked(entry, wait_seconds=0, should_stop=lambda: False):
        with pytest.raises(Preempted) as caught:
            with locked(entry, wait_seconds=99, should_stop=lambda: True):
                raise AssertionError("both hold the lock")
    error = caught.value
    assert (error.exit_code, error.where) == (75, "preparing data")
    assert "asked to stop" in error.found
    assert "time to prepare" in error.expected
    assert "launch the same command again" in error.action


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    """One variable moves the cache, for machines that share a disk."""
    monkeypatch.setenv("MPRECIPES_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("MPRECIPES_CACHE")
    assert default_cache_dir().parts[-2:] == (".cache", "mprecipes")
