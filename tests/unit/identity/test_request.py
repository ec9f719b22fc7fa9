# SPDX-License-Identifier: Apache-2.0
"""A file asks once, is looked for rarely, and can harm nothing."""

from pathlib import Path

import pytest

from mprecipes.identity.request import RequestFile


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def made(tmp_path):
    clock = Clock()
    return RequestFile(tmp_path / "STOP", clock), tmp_path / "STOP", clock


def test_it_is_looked_for_once_a_second(made, monkeypatch):
    """A file that comes 0.5 s after a look is seen 0.5 s later; 1000 questions are two looks."""
    request, path, clock = made
    looks = []
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: looks.append(self) or exists(self))
    assert not request.asked
    path.touch()
    clock.now = 0.5
    assert not any(request.asked for _ in range(1000))
    clock.now = 1.0
    assert all(request.asked for _ in range(1000))
    assert looks == [path, path]


def test_the_answer_removes_it(made):
    """Also one that has not been seen yet; without a file there is nothing to remove."""
    request, path, clock = made
    path.touch()
    assert request.asked
    request.answer()
    assert not path.exists()
    assert not request.asked
    path.touch()
    request.answer()
    request.answer()
    clock.now = 5.0
    assert not request.asked


def test_a_file_that_cannot_be_removed_is_ignored(made, caplog):
    """Here it is a folder with something in it: said once, and it asks no more."""
    request, path, clock = made
    (path / "more").mkdir(parents=True)
    assert request.asked
    request.answer()
    clock.now = 9.0
    assert not request.asked
    assert "STOP cannot be removed" in caplog.text
    assert path.exists()


def test_a_disk_that_does_not_answer_asks_for_nothing(made, monkeypatch):
    """A stale network handle is no request, and the next look is one again."""
    request, path, clock = made
    path.touch()
    with monkeypatch.context() as patch:

        def stale(_):
            raise OSError(116, "Stale file handle")

        patch.setattr(Path, "exists", stale)
        assert not request.asked
    clock.now = 1.0
    assert request.asked
