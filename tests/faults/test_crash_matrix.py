# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at every named point of a run's life with its checkpoints, then a real next launch.

A run is trained to step 3, keeping two checkpoints, its best by a metric, two milestones and a
mirror. The next process goes on from there and is killed at the point; the one after it goes on to
step 8. Whatever the point: what counts as a checkpoint is whole, no good one is missing that was
there before, the training ends with the bits of a run that nobody killed, and all that was to
follow (milestones, deletion, mirror, tidying up) has been made up for.
"""

import shutil
import signal
from typing import NamedTuple

import pytest

from mprecipes.checkpoint.manifest import read_manifest, verify_folder
from mprecipes.checkpoint.mirror import Mirror
from tests.faults import points
from tests.kept import flip
from tests.save_server import run_jobs

pytestmark = pytest.mark.faults

SAVED = points.ALL_BEFORE + points.MAIN_BEFORE + points.ALL_AFTER + points.MAIN_AFTER
PREPARED = {
    **dict.fromkeys(points.SWEEP, "leftover"),
    **dict.fromkeys(points.QUARANTINE, "damaged"),
    **dict.fromkeys(points.FETCH, "lost"),
}
EVERY = (*SAVED, *points.ALL_RESTORE, *PREPARED)
BY_ALL = points.ALL_BEFORE + points.ALL_AFTER + points.ALL_RESTORE
BEFORE = points.ALL_BEFORE + points.MAIN_BEFORE
BOTH = "both"
# On two ranks `make test` takes one point of each kind, the whole is for `make test-full`.
QUICK = {
    ("save.after_copy", 1), ("save.in_file", 1), ("save.in_file", BOTH), ("save.after_gather", 1),
    ("save.after_manifest", 0), ("save.after_rename", 0), ("save.after_commit", 1),
    ("milestone.before_publish", 0), ("retention.after_rename", 0), ("restore.after_read", 1),
    ("quarantine.after_move", 0), ("fetch.before_publish", 0),
}  # fmt: skip
PAIRS = [(point, rank) for point in BY_ALL for rank in (0, 1, BOTH)]
PAIRS += [(point, 0) for point in EVERY if point not in BY_ALL]


class Scene(NamedTuple):
    """The parent of a run's folder and its mirror's."""

    home: object

    @property
    def run(self):
        return self.home / "run"

    def launch(self, until, count=1, fault=None, rank=None):
        """Launches the run; gives each rank's result. A fault is for one rank or for all."""
        policy = {
            "mirror": f"file://{self.home}/mirror",
            "milestone_steps": [5],
            "keep_best": "eval/loss",
        }
        at = f"@rank{rank}" if rank in (0, 1) else ""
        env = {"MPRECIPES_FAULT": f"kill@{fault}{at}"} if fault else {}
        job = {"run": self.run, "action": "launch", "until": until, "policy": policy, "env": env}
        jobs = [{**job, "rank": number, "world_size": count} for number in range(count)]
        return run_jobs(*jobs)

    def good(self, kind="checkpoints"):
        """Gives the steps of what counts as a checkpoint; fails when a byte of one is wrong."""
        folders = [p for p in (self.run / kind).glob("[!.]*") if p.is_dir()]
        assert [problem for folder in folders for problem in verify_folder(folder)] == []
        return sorted(read_manifest(folder).step for folder in folders)

    def copied(self, home):
        shutil.copytree(self.home, home, dirs_exist_ok=True)
        return Scene(home)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Runs at step 3, by number of processes."""
    scenes = {count: Scene(tmp_path_factory.mktemp(f"begun{count}")) for count in (1, 2)}
    for count, scene in scenes.items():
        results = scene.launch(3, count)
        assert [result["status"] for result in results] == [0] * count, results
        assert scene.good()[-2:] == [2, 3]  # an older one stays while it is mirrored
    return scenes


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """State digests at step 8 of runs that nobody killed, by number of processes."""
    digests = {}
    for count in (1, 2):
        results = Scene(tmp_path_factory.mktemp(f"whole{count}")).launch(8, count)
        assert [result["status"] for result in results] == [0] * count, results
        digests[count] = results[0]["value"]["digests"]
    return digests


def prepare(scene, kind):
    """Brings a run into the state in which the point is passed; gives its two good steps."""
    checkpoints = scene.run / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000001", ignore_errors=True)
    if kind == "leftover":
        for name in (".staging-step-00000009-0123456789ab", ".trash-step-00000001-0123456789ab"):
            shutil.copytree(checkpoints / "step-00000002", checkpoints / name)
            (checkpoints / name / "manifest.json").unlink()
        (checkpoints / ".evaluations.json.1.tmp").write_text("{")
    elif kind == "damaged":
        flip(checkpoints / "step-00000003" / "tensors-rank00000-000.safetensors")
        return [2]
    elif kind == "lost":
        shutil.rmtree(checkpoints)
        return []
    return [2, 3]


def crash(scene, whole, point, rank=None, count=1):
    """Kills at the point, looks at the disk, launches again, and looks at everything."""
    kind = PREPARED.get(point, "plain")
    before = prepare(scene, kind)
    results = scene.launch(6, count, point, rank)
    dead = [number for number in range(count) if rank in (None, BOTH, number)]
    assert [results[number] for number in dead] == [{"status": -signal.SIGKILL}] * len(dead)

    damaged = scene.run / "checkpoints" / "step-00000003"
    if kind == "damaged" and damaged.exists():  # it was not moved yet
        assert point == "quarantine.before_move"
        shutil.move(damaged, scene.home / "damaged")
        good = scene.good()
        shutil.move(scene.home / "damaged", damaged)
    else:
        good = scene.good()
    assert len(good) >= len(before)
    assert good[-1:] >= before[-1:]
    if point in BEFORE and (point, rank, count) != ("save.after_gather", 1, 2):
        assert good[-1] == 3  # else rank 0 may publish what both had written
    elif point in SAVED:
        assert good[-1] >= 3 + (point not in BEFORE)
    scene.good("milestones")

    results = scene.launch(8, count)
    for result in results:
        assert result["status"] == 0, result
        assert result["value"]["step"] == (good[-1] if good else 3)
        assert result["value"]["digests"] == whole[count]
    assert scene.good()[-2:] == [7, 8]
    assert scene.good("milestones") == [4, 5]
    assert len(list((scene.run / "quarantine").glob("[!.]*.json"))) <= (kind == "damaged")
    left = [path.name for path in scene.run.rglob(".*")]
    assert left == []
    mirror = Mirror(f"file://{scene.home}/mirror", scene.run)
    found = mirror.published()
    assert [problem for each in found for problem in mirror.verify(each, lambda _: None)] == []
    here = {f"checkpoints/step-{step:08d}" for step in scene.good()}
    assert here | {"milestones/step-00000005", "milestones/four"} <= {each.place for each in found}


@pytest.mark.parametrize("point", EVERY)
def test_killed_at_every_point(tmp_path, begun, whole, point):
    """One process."""
    crash(begun[1].copied(tmp_path), whole, point)


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow], id=f"{pair}")
        for pair in PAIRS
    ],
)
def test_one_or_both_of_two_ranks_killed_at_every_point(tmp_path, begun, whole, point, rank):
    """Two processes: also between the ranks' commits, and both at once."""
    crash(begun[2].copied(tmp_path), whole, point, rank, 2)


def test_killed_in_its_first_save(tmp_path, whole):
    """A run that never published anything begins again; it is not refused."""
    scene = Scene(tmp_path)
    assert scene.launch(6, fault="save.before_publish") == [{"status": -signal.SIGKILL}]
    assert scene.good() == []
    (result,) = scene.launch(8)
    assert (result["value"]["step"], result["value"]["digests"]) == (0, whole[1])


def test_killed_twice_in_a_row(tmp_path, begun, whole):
    """A second death in the same save loses no more than the first."""
    scene = begun[1].copied(tmp_path)
    assert scene.launch(6, fault="save.after_file") == [{"status": -signal.SIGKILL}]
    crash(scene, whole, "save.after_manifest")
