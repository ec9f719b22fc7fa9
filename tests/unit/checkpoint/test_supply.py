# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that a node lacks. Between real processes: `tests/faults/test_node_folders.py`."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mprecipes.checkpoint.manifest import Problem, files_of, read_manifest, verify_folder
from mprecipes.checkpoint.shelf import Shelf
from mprecipes.checkpoint.supply import look, supply
from mprecipes.compute.ranks import Ranks
from mprecipes.identity.files import sha256_file
from tests.toys import Run

NAME = "step-00000002"


@pytest.fixture
def there(tmp_path):
    """The checkpoint of the other node."""
    run = Run(tmp_path / "there")
    run.train([1, 2])
    return run.folder.checkpoints / NAME


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path / "here" / "checkpoints", tmp_path / "here" / "quarantine", "id")


@dataclass(frozen=True)
class Second(Ranks):
    """Rank 1 of two nodes; what rank 0 says is worked out from its folder."""

    rank: int = 1
    world_size: int = 2
    writers: tuple[int, ...] = (0, 1)
    there: Path = Path()
    told: list = field(default_factory=list)
    spoiled: str = ""

    def gather(self, value):
        looked = (None, look(self.there) if self.there.is_dir() else None)
        self.told.append(value)
        return [looked if len(self.told) == 1 else (None, []), value]

    def share(self, value, source=0):
        manifest = read_manifest(self.there)
        return manifest.raw, files_of(manifest)

    def spread(self, files, place):
        for parcel in files:
            assert (parcel.source, parcel.takers) == (0, frozenset({1}))
            shutil.copyfile(self.there / parcel.path, place(parcel.path))
        digests = {path.name: sha256_file(path) for path in self.there.iterdir()}
        return digests | ({self.spoiled: "0" * 64} if self.spoiled else {})


def test_nothing_is_done_on_a_shared_disk(shelf):
    """One rank writes: what it has is all there is."""
    assert supply(shelf, Ranks(), NAME) == ([0], {})
    assert not shelf.checkpoints.exists()


def test_what_arrives_is_published_whole(shelf, there, caplog):
    """Under the same name, verified, with a word about it."""
    assert supply(shelf, Second(there=there), NAME) == ([0, 1], {})
    assert verify_folder(shelf.checkpoints / NAME) == []
    assert [path.name for path in shelf.checkpoints.iterdir()] == [NAME]
    assert f"{NAME} was missing on the node of rank 1: sent by rank 0" in caplog.text


def test_what_arrives_as_other_bytes_is_no_checkpoint(shelf, there):
    """The sender's copy is called damaged, and nothing is left here."""
    holders, wrong = supply(shelf, Second(there=there, spoiled="rank-00000.json"), NAME)
    assert (holders, list(wrong)) == ([0], [0])
    assert wrong[0][0].path == "rank-00000.json"
    assert wrong[0][0].found == f"sha256 {'0' * 64} when sent"
    assert list(shelf.checkpoints.iterdir()) == []


def test_a_copy_that_looks_damaged_is_not_sent(shelf, there):
    """Its problems are those of the node that has it."""
    (there / "stranger").touch()
    problem = Problem("stranger", "a file the manifest does not list", "no such file")
    assert supply(shelf, Second(there=there), NAME) == ([0], {0: [problem]})


def test_a_rank_that_writes_nothing_does_not_look(shelf, monkeypatch):
    """Its writer may be moving the folder to quarantine while it would read there."""

    class Neighbour(Ranks):
        def gather(self, value):
            assert value == (None, None)
            return [(None, []), value, (None, [])]

    (shelf.checkpoints / NAME).mkdir(parents=True)
    monkeypatch.setattr("mprecipes.checkpoint.supply.look", lambda folder: 1 / 0)
    ranks = Neighbour(rank=1, world_size=3, writers=(0, 2))
    assert supply(shelf, ranks, NAME) == ([0, 2], {})
