# SPDX-License-Identifier: Apache-2.0
"""Branches that were given up are noted before they are moved, and known by their root digests."""

import json

import pytest

from mprecipes.checkpoint.abandoned import Cut, abandon, abandoned_roots, read_cuts
from mprecipes.checkpoint.milestones import make_milestone
from mprecipes.errors import CheckpointError
from tests.kept import Folder, write_checkpoint


@pytest.fixture
def run(tmp_path):
    return Folder(tmp_path / "mine")


def test_a_cut_is_noted_with_what_is_set_aside(run):
    """Step and root digests are on the disk; nothing is noted where nothing was given up."""
    kept, gone = run.save(2), run.save(4)
    abandon(run.path, [], kept=[kept])
    assert read_cuts(run.path) == [] and not (run.path / "abandoned.json").exists()
    abandon(run.path, [gone], from_step=3, kept=[kept])
    (cut,) = read_cuts(run.path)
    assert (cut.from_step, cut.roots) == (3, {gone.root_sha256})
    facts = json.loads((run.path / "abandoned.json").read_text("utf-8"))
    assert facts["schema"] == 1 and facts["cuts"][0]["roots"] == [gone.root_sha256]


def test_later_milestones_are_given_up_too(run):
    """One whose checkpoint was deleted is as much of the branch; earlier ones are not."""
    early, late = run.save(2), run.save(4)
    make_milestone(early, run.milestones, "early")
    make_milestone(late, run.milestones, "late")
    abandon(run.path, [], from_step=3)
    assert read_cuts(run.path)[0].roots == {late.root_sha256}


def test_what_is_gone_on_from_is_abandoned_no_more(run):
    """A checkpoint that was set aside and brought back is good again; the cut stays."""
    one, other = run.save(4), run.save(6)
    abandon(run.path, [one, other], from_step=3)
    abandon(run.path, [], kept=[one])
    (cut,) = read_cuts(run.path)
    assert (cut.from_step, cut.roots) == (3, {other.root_sha256})


@pytest.mark.parametrize("text", ["[", "{}", '{"cuts": [{"id": "a"}]}', '{"cuts": [1]}'])
def test_a_damaged_note_is_refused(run, text):
    """Nothing is set aside without a note, and the file to remove is named."""
    run.path.mkdir()
    (run.path / "abandoned.json").write_text(text)
    with pytest.raises(OSError, match=r"abandoned.json is damaged .* remove it"):
        read_cuts(run.path)
    with pytest.raises(CheckpointError) as caught:
        abandon(run.path, [], from_step=3)
    assert "abandoned.json is damaged" in caught.value.found
    assert caught.value.where == "abandoned.json"
    assert caught.value.expected and caught.value.action


def test_what_a_mirror_holds_is_judged_by_root_digest(run):
    """From the step of a cut that it does not know all is abandoned, afterwards only the digests;
    what lies here is not; the same step saved again is another checkpoint."""
    two, four, six = run.save(2), run.save(4), run.save(6)
    again = write_checkpoint(run.path / "again", 4, salt=2.0)
    cut = Cut("a", 3, frozenset({four.root_sha256}))
    there = [two, four, six]
    nothing = frozenset[str]()
    found = abandoned_roots([cut], there, known=nothing, noted=[])
    assert found == {four.root_sha256, six.root_sha256}
    assert abandoned_roots([cut], [two, again, six], known=found, noted=["a"]) == found
    assert again.root_sha256 not in found
    lost = abandoned_roots([], [two, again, six], known=found, noted=["a"])
    assert lost == found
    assert abandoned_roots([cut], there, known=found, noted=["a"], here=[six]) == {four.root_sha256}
    by_digest = Cut("b", None, frozenset({four.root_sha256}))
    assert abandoned_roots([by_digest], there, known=nothing, noted=[]) == {four.root_sha256}
