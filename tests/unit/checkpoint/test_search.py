# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint is trusted, and what happens to those that are not."""

import shutil
from dataclasses import dataclass, field

import pytest

from mprecipes.checkpoint.manifest import Problem
from mprecipes.checkpoint.search import Refusal, find_newest, verify_everywhere
from mprecipes.checkpoint.shelf import Shelf
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import CheckpointError, NoTrustedCheckpoint
from tests.toys import Run


def find_newest_trusted(shelf, ranks):
    """Every byte is read, and there is no mirror."""
    return find_newest(
        shelf, ranks, lambda manifest: verify_everywhere(manifest.folder, ranks)[1], lambda: None
    )


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    run.train([1, 2, 3])
    return run


@pytest.fixture
def shelf(run):
    return Shelf(run.folder.checkpoints, run.folder.quarantine, "0123456789ab")


def cut(run, step, file="rank-00000.json"):
    path = run.folder.checkpoints / f"step-{step:08d}" / file
    path.write_bytes(path.read_bytes()[:-1])


def test_a_run_that_has_saved_nothing_has_none(tmp_path):
    """No checkpoint ever is no error."""
    shelf = Shelf(tmp_path / "checkpoints", tmp_path / "quarantine", "id")
    assert find_newest_trusted(shelf, Ranks()) == (None, [])


def test_the_newest_is_taken(run, shelf):
    """With nothing damaged the highest step wins and nothing is refused."""
    manifest, refusals = find_newest_trusted(shelf, Ranks())
    assert (manifest.step, refusals) == (3, [])


def test_damaged_ones_are_passed_over_by_name(run, shelf):
    """Bad files and a bad manifest go to quarantine; the newest good one is given."""
    cut(run, 3)
    cut(run, 2, "manifest.json")
    manifest, refusals = find_newest_trusted(shelf, Ranks())
    assert manifest.step == 1
    assert [(each.name, each.problems[0].path, each.quarantined_as) for each in refusals] == [
        ("step-00000002", "manifest.json", "step-00000002"),
        ("step-00000003", "rank-00000.json", "step-00000003"),
    ]
    assert shelf.quarantined() == ["step-00000002", "step-00000003"]
    assert run.names() == ["step-00000001"]


def test_a_second_copy_of_a_step_may_stand_in(run, shelf):
    """Where the published folder is damaged, an intact copy of the step is found by manifest."""
    folder = run.folder.checkpoints
    shutil.copytree(folder / "step-00000003", folder / "kept-by-hand")
    cut(run, 3)
    manifest, _ = find_newest_trusted(shelf, Ranks())
    assert (manifest.step, manifest.folder.name) == (3, "kept-by-hand")


def test_none_left_is_refused_and_stays_refused(run, shelf):
    """A run whose checkpoints are all bad does not begin again, nor at the launch after."""
    for step in (1, 2, 3):
        cut(run, step)
    for first in (True, False):
        with pytest.raises(NoTrustedCheckpoint) as caught:
            find_newest_trusted(shelf, Ranks())
        lines = caught.value.found.splitlines()
        assert lines[0] == "no checkpoint verifies:"
        assert lines[1].startswith(
            "    step-00000003: rank-00000.json:"
            if first
            else "    quarantine/step-00000001: refused earlier"
        )
        assert len(lines) == 4
        assert caught.value.expected == "at least one whose every byte agrees with its manifest"
        assert caught.value.where == "checkpoints/"
        assert "--output_dir" in caught.value.action


def test_a_quarantine_that_cannot_be_made_changes_no_verdict(run, shelf, caplog):
    """A refused checkpoint is not loaded even when it cannot be moved."""
    cut(run, 3)
    run.folder.quarantine.write_text("a file in the way")
    manifest, refusals = find_newest_trusted(shelf, Ranks())
    assert manifest.step == 2
    assert refusals[0].quarantined_as is None
    assert "could not be moved to quarantine" in caplog.text


def test_what_can_be_seen_without_reading_is_seen_first(run, shelf):
    """A wrong size, a stranger and a wrong SHA256SUMS are refused before anything is accepted."""
    folder = run.folder.checkpoints
    cut(run, 3, "tensors-rank00000-000.safetensors")
    (folder / "step-00000002" / "stranger").touch()
    sums = folder / "step-00000001" / "SHA256SUMS"
    sums.write_bytes(sums.read_bytes().replace(b"  ", b" *"))
    accepted = []
    with pytest.raises(NoTrustedCheckpoint):
        find_newest(shelf, Ranks(), accepted.append, lambda: None)
    assert accepted == []


def test_what_is_refused_while_reading_is_passed_over(run, shelf):
    """The problems that accepting found are the reason in quarantine."""
    problem = Problem("tensors-rank00000-000.safetensors", "sha256 1", "sha256 2")
    manifest, refusals = find_newest(
        shelf, Ranks(), lambda m: {0: [problem]} if m.step == 3 else {}, lambda: None
    )
    assert manifest.step == 2
    assert refusals == [Refusal("step-00000003", [problem], "step-00000003")]


def test_the_mirror_is_asked_last_and_once(run, shelf):
    """What it brings is looked at like any other; bringing nothing is no trusted checkpoint."""
    for step in (1, 2, 3):
        cut(run, step)
    asked = []

    def fetch():
        asked.append(shelf.scan()[0])
        run.train([7])
        return shelf.scan()[0][0]

    manifest, refusals = find_newest(shelf, Ranks(), lambda manifest: {}, fetch)
    assert manifest.step == 7
    assert (asked, len(refusals)) == ([[]], 3)


@dataclass(frozen=True)
class Peer(Ranks):
    """Rank 0 of two, whose peer has another manifest for step 3, or problems with it."""

    world_size: int = 2
    problems: tuple = ()
    asked: list = field(default_factory=list)

    def share(self, value):
        return value

    def gather(self, value):
        _, found = value
        if isinstance(found, tuple) and isinstance(found[0], str) and not self.asked:
            self.asked.append(found[0])
            other = None if self.problems else "another root"
            return [value, (None, (other, list(self.problems)))]
        return [value, value]


def test_a_rank_that_reads_other_bytes_is_heard(run, shelf):
    """What one rank finds damaged is refused for all."""
    problem = Problem("tensors-rank00000-000.safetensors", "sha256 1", "sha256 2")
    manifest, refusals = find_newest_trusted(shelf, Peer(problems=(problem,)))
    assert manifest.step == 2
    assert refusals == [Refusal("step-00000003", [problem], "step-00000003")]


def test_ranks_that_read_different_checkpoints_are_heard(run, shelf):
    """Two intact checkpoints of one name that differ are not one checkpoint."""
    manifest, refusals = find_newest_trusted(shelf, Peer())
    assert manifest.step == 2
    assert refusals[0].problems[0].found == "not the same on all ranks"


@dataclass(frozen=True)
class Nodes(Ranks):
    """Rank 0 of two nodes; the other's disk is not this one, so nothing is sent."""

    world_size: int = 2
    writers: tuple[int, ...] = (0, 1)

    def share(self, value, source=0):
        return value

    def gather(self, value):
        return [value, value]


def test_a_node_that_does_not_keep_what_it_is_sent_ends_the_launch(run, shelf):
    """Refused there, sent again, refused again: its disk is named, and no good copy is moved."""
    problem = Problem("tensors-rank00000-000.safetensors", "sha256 1", "sha256 2")
    with pytest.raises(CheckpointError) as caught:
        find_newest(shelf, Nodes(), lambda manifest: {1: [problem]}, lambda: None)
    assert "step-00000003 was sent to the node of rank 1 and does not verify" in caught.value.found
    assert "the copies of the other nodes are untouched" in caught.value.action
    assert (shelf.quarantined(), "step-00000003" in run.names()) == ([], True)
