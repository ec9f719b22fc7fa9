# SPDX-License-Identifier: Apache-2.0
"""The files of a second home: whole there or not a checkpoint there."""

import importlib.util
import json

import fsspec
import pytest

from mprecipes.checkpoint.manifest import read_manifest
from mprecipes.checkpoint.mirror import Mirror, foreign
from mprecipes.errors import ConfigError
from tests.kept import RANK, TENSORS, Folder, contents, flip, write_checkpoint

NAMES = ["SHA256SUMS", "manifest.json", RANK, TENSORS]


def go_on(num_bytes: int) -> None:
    """Never gives up."""


@pytest.fixture
def run(tmp_path):
    return Folder(tmp_path / "mine")


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    """A place on a mounted file system, and one of an object store's kind."""
    return f"{request.param}://{tmp_path}/mirror"


@pytest.fixture
def mirror(url, run):
    return Mirror(url, run.path)


def files(url, place):
    """Every file below a place of the mirror, by name, read without the product."""
    fs, root = fsspec.core.url_to_fs(url)
    base = f"{root}/{place}"
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.ls(base, detail=False)}


def write(url, place, data):
    fs, root = fsspec.core.url_to_fs(url)
    fs.makedirs(f"{root}/{place}".rpartition("/")[0], exist_ok=True)
    fs.pipe_file(f"{root}/{place}", data)


def test_a_pushed_checkpoint_is_the_same(run, mirror, url):
    """Every byte is there under the run folder's name, it verifies, and its size was sent."""
    source = run.save(4)
    sent = mirror.push(source, "checkpoints", "step-00000004", go_on)
    assert files(url, "mine/checkpoints/step-00000004") == contents(source.folder)
    assert sent == sum(map(len, contents(source.folder).values()))
    (there,) = mirror.published()
    assert (there.kind, there.name, there.place) == (
        "checkpoints", "step-00000004", "checkpoints/step-00000004",
    )  # fmt: skip
    assert there.manifest is not None and there.manifest.root_sha256 == source.root_sha256
    assert mirror.verify(there, go_on) == []
    assert mirror.home == f"{url}/mine"


def test_nothing_is_there_before_the_first(mirror):
    """An empty place holds nothing and belongs to nobody."""
    assert mirror.published() == []
    assert mirror.owner() is None


def test_newest_first_and_unreadable_ones_before_all(run, mirror, url):
    """Order is by the step in the manifest, over both kinds."""
    for step in (4, 12):
        mirror.push(run.save(step), "checkpoints", f"step-{step:08d}", go_on)
    mirror.push(run.save(8), "milestones", "half", go_on)
    write(url, "mine/checkpoints/step-00000002/manifest.json", b"{}")
    found = mirror.published()
    assert [each.name for each in found] == [
        "step-00000002", "step-00000012", "half", "step-00000004",
    ]  # fmt: skip
    assert found[0].manifest is None
    (problem,) = mirror.verify(found[0], go_on)
    assert (problem.path, problem.found) == ("manifest.json", "no schema number")
    assert [each.name for each in mirror.published(["milestones"])] == ["half"]


@pytest.mark.parametrize("point", ["before_file", "before_manifest"])
def test_a_copy_that_was_cut_is_no_checkpoint(run, mirror, url, monkeypatch, point):
    """Without its manifest it does not count; the next push sends only what is missing."""
    source = run.save(4)
    monkeypatch.setenv("MPRECIPES_FAULT", f"eio@mirror.{point}:4")
    with pytest.raises(OSError, match="planted"):
        mirror.push(source, "checkpoints", "step-00000004", go_on)
    assert mirror.published() == []
    monkeypatch.delenv("MPRECIPES_FAULT")
    sent = mirror.push(source, "checkpoints", "step-00000004", go_on)
    sizes = {name: len(data) for name, data in contents(source.folder).items()}
    assert sent == (sum(sizes.values()) if point == "before_file" else sizes["manifest.json"])
    assert files(url, "mine/checkpoints/step-00000004") == contents(source.folder)


def test_giving_up_leaves_no_checkpoint(run, mirror):
    """Whatever `go_on` raises comes through, and nothing half is published."""

    def give_up(num_bytes):
        if num_bytes:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        mirror.push(run.save(4), "checkpoints", "step-00000004", give_up)
    assert mirror.published() == []


def test_a_file_that_is_damaged_there_is_sent_again(run, mirror, url):
    """A file of the right size and the wrong bytes is not taken for copied."""
    source = run.save(4)
    write(url, f"mine/checkpoints/step-00000004/{TENSORS}", b"x" * len(
        contents(source.folder)[TENSORS]))  # fmt: skip
    mirror.push(source, "checkpoints", "step-00000004", go_on)
    assert files(url, "mine/checkpoints/step-00000004") == contents(source.folder)


def test_a_source_that_rotted_is_not_published(run, mirror):
    """What is read back must be what the manifest promises, so bad bytes here stop there."""
    source = run.save(4)
    flip(source.folder / TENSORS)
    with pytest.raises(OSError, match="reads back with sha256") as caught:
        mirror.push(source, "checkpoints", "step-00000004", go_on)
    assert TENSORS in str(caught.value)
    assert mirror.published() == []


def test_another_checkpoint_of_the_name_takes_the_place(run, mirror, url):
    """Of a step that was saved again the new bytes are there, and never a mixture."""
    mirror.push(run.save(4), "checkpoints", "step-00000004", go_on)
    again = write_checkpoint(run.path / "again", 4, salt=2.0)
    mirror.push(again, "checkpoints", "step-00000004", go_on)
    assert files(url, "mine/checkpoints/step-00000004") == contents(again.folder)


def test_files_of_the_one_before_do_not_stay(run, mirror, url, monkeypatch):
    """A step saved again as fewer files verifies there, also when the first copy was cut."""
    mirror.push(run.save(4), "checkpoints", "step-00000004", go_on)
    for name in ("tensors-rank00001-000.safetensors", "rank-00001.json", ".nfs0001"):
        write(url, f"mine/checkpoints/step-00000004/{name}", b"of another launch")
    again = write_checkpoint(run.path / "again", 4, salt=2.0)
    monkeypatch.setenv("MPRECIPES_FAULT", "eio@mirror.before_file:4")
    with pytest.raises(OSError, match="planted"):
        mirror.push(again, "checkpoints", "step-00000004", go_on)
    assert mirror.published() == []
    monkeypatch.delenv("MPRECIPES_FAULT")
    mirror.push(again, "checkpoints", "step-00000004", go_on)
    found = files(url, "mine/checkpoints/step-00000004")
    assert found.pop(".nfs0001") == b"of another launch"
    assert found == contents(again.folder)
    (problem,) = mirror.verify(mirror.published()[0], go_on)
    assert problem.path == ".nfs0001"


@pytest.mark.parametrize(
    ("name", "damage", "found"),
    [
        (TENSORS, lambda data: data[:-1] + b"?", "sha256"),
        (TENSORS, lambda data: data + b"?", "bytes"),
        ("SHA256SUMS", lambda data: data[:-2] + b"?\n", "sha256"),
    ],
)
def test_damage_there_is_found_by_name(run, mirror, url, name, damage, found):
    """A flipped byte and a wrong size are named by file and, for tensors, by what is in it."""
    source = run.save(4)
    mirror.push(source, "checkpoints", "step-00000004", go_on)
    place = "mine/checkpoints/step-00000004"
    write(url, f"{place}/{name}", damage(contents(source.folder)[name]))
    write(url, f"{place}/extra", b"x")
    (there,) = mirror.published()
    extra, problem = mirror.verify(there, go_on)
    assert (extra.path, extra.found) == ("extra", "a file the manifest does not list")
    assert problem.path == name and found in problem.found
    both = ["optimizer/layer.weight/exp_avg", "weights/layer.weight"]
    assert sorted(problem.tensors) == (both if name == TENSORS else [])


def test_a_file_missing_there_is_found(run, mirror, url):
    """A file that is gone is named."""
    mirror.push(run.save(4), "checkpoints", "step-00000004", go_on)
    fs, root = fsspec.core.url_to_fs(url)
    fs.rm_file(f"{root}/mine/checkpoints/step-00000004/{RANK}")
    (problem,) = mirror.verify(mirror.published()[0], go_on)
    assert (problem.path, problem.found) == (RANK, "missing")


def test_deleting(run, mirror, url):
    """A deleted checkpoint is gone with its files; a milestone cannot be deleted."""
    mirror.push(run.save(4), "checkpoints", "step-00000004", go_on)
    mirror.push(run.save(8), "milestones", "half", go_on)
    milestone, checkpoint = mirror.published()
    mirror.delete(checkpoint)
    assert [each.place for each in mirror.published()] == ["milestones/half"]
    with pytest.raises((FileNotFoundError, IndexError)):
        files(url, "mine/checkpoints/step-00000004")["manifest.json"]
    with pytest.raises(AssertionError):
        mirror.delete(milestone)


def test_fetching_gives_the_same_bytes(run, mirror, tmp_path):
    """What comes back is byte for byte what was sent, its manifest included."""
    source = run.save(4)
    mirror.push(source, "checkpoints", "step-00000004", go_on)
    target = tmp_path / "back"
    target.mkdir()
    mirror.fetch(mirror.published()[0], target)
    assert contents(target) == contents(source.folder)
    assert sorted(contents(target)) == sorted(NAMES)
    assert read_manifest(target).root_sha256 == source.root_sha256


def test_what_was_given_up_is_written_down(mirror, url):
    """It stays known over claims, and a mirror from before there was such a list has none."""
    assert mirror.abandoned() == (frozenset(), frozenset())
    write(url, "mine/mirror.json", b'{"schema": 1, "writer": "aaa", "run_ids": ["aaa"]}')
    assert mirror.abandoned() == (frozenset(), frozenset())
    mirror.abandon(["two", "one"], ["cut"])
    mirror.claim("bbb")
    assert mirror.abandoned() == ({"one", "two"}, {"cut"})
    assert mirror.owner() == {"writer": "bbb", "run_ids": ["aaa", "bbb"]}


def test_the_owner_is_written_down(mirror, url):
    """The newest claim writes; the runs whose checkpoints lie there stay known."""
    mirror.claim("aaa")
    mirror.claim("bbb", ["aaa", "old"])
    assert mirror.owner() == {"writer": "bbb", "run_ids": ["aaa", "old", "bbb"]}
    assert json.loads(files(url, "mine")["mirror.json"])["schema"] == 1
    write(url, "mine/mirror.json", b"[")
    with pytest.raises(OSError, match="damaged"):
        mirror.owner()
    error = foreign(mirror, {"writer": "bbb"}, "ccc")
    assert error.found == "run bbb writes here"
    assert "ccc" in error.expected
    assert error.where == f"{url}/mine"
    assert "another" in error.action


@pytest.mark.parametrize(
    ("url", "said"), [("nosuch://x/y", "Protocol not known"), ("s3://x/y", "Install s3fs")]
)
def test_a_file_system_that_is_not_here_is_refused(tmp_path, url, said):
    """Before anything starts, with the package to install."""
    if url.startswith("s3") and importlib.util.find_spec("s3fs"):
        pytest.skip("s3fs is installed here")
    with pytest.raises(ConfigError) as caught:
        Mirror(url, tmp_path)
    assert said in caught.value.found
    assert caught.value.where == "mirror in option checkpoint"
    assert caught.value.expected and caught.value.action
