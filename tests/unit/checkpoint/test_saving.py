# SPDX-License-Identifier: Apache-2.0
"""One save: what is refused before it begins, and who hears when it fails."""

import shutil
from dataclasses import dataclass

import pytest

from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position
from mprecipes.errors import CheckpointError, NumericsError
from tests.toys import Run


def test_too_little_space_is_refused_before_a_byte_is_written(tmp_path, monkeypatch):
    """Measured size x 1.1 and a margin must be free; older checkpoints stay; the run goes on."""
    run = Run(tmp_path)
    run.train([1])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=16 << 20))
    with pytest.raises(CheckpointError) as caught:
        run.save(2)
    assert caught.value.found == "16.8 MB are free on the disk of checkpoints/"
    assert caught.value.expected.startswith("16.8 MB: the measured 0.0 MB x 1.1 + 16.8 MB")
    assert caught.value.where == "saving step 2"
    assert "--keep_last" in caught.value.action
    assert run.names() == ["step-00000001"]


def test_a_folder_that_cannot_be_written_is_a_failed_save(tmp_path):
    """Here a file is in its place; when it is gone the next save works."""
    run = Run(tmp_path)
    run.folder.checkpoints.write_text("in the way")
    with pytest.raises(CheckpointError, match="FileExistsError"):
        run.save(1)
    run.folder.checkpoints.unlink()
    run.train([2])
    assert run.manager.candidates() == [2]


def test_e03_a_run_without_one_update_has_no_end_to_keep(tmp_path):
    """Ten steps, all skipped, are fewer than the sixteen in a row that would have ended the run."""
    run = Run(tmp_path)
    with pytest.raises(NumericsError) as caught:
        run.manager.save(Position(10, 0, 40, 600), {}, {}, milestone="pretrain-end", wait=True)
    assert caught.value.found == "milestone pretrain-end: none of 10 steps was applied"
    assert caught.value.expected == "at least one update; nothing was published"
    assert caught.value.where == "saving step 10" and "bf16" in caught.value.action
    assert not run.folder.checkpoints.exists()
    run.manager.save(Position(10, 0, 40, 600), {}, {}, wait=True)  # rolling: to go on from
    assert run.names() == ["step-00000010"]


def test_metrics_of_the_step_reach_the_plan(tmp_path):
    """The best by evaluation stays although it is the oldest."""
    policy = CheckpointPolicy(keep_last=1, keep_best="eval/loss")
    run = Run(tmp_path, policy=policy)
    for step, loss in ((1, 0.5), (2, 0.9), (3, 0.7)):
        run.train([step], save=False)
        position = run.position(step)
        run.manager.save(position, facts={}, rank_state={}, metrics={"eval/loss": loss}, wait=True)
    assert run.manager.candidates() == [3, 1]


@dataclass(frozen=True)
class Alone(Ranks):
    """Rank 0 of two, whose peer is gone."""

    world_size: int = 2

    def with_own_group(self):
        return self

    def gather(self, value):
        raise RuntimeError("Connection closed by peer")


def test_a_rank_that_lost_its_peers_says_so_and_stops(tmp_path):
    """Without agreement no later save can succeed either, whatever the policy says about disks."""
    run = Run(tmp_path, ranks=Alone())
    run.train([1], wait=False)
    run.manager.wait()
    (report,) = run.manager.finished()
    assert "rank 0 lost the others: RuntimeError: Connection closed by peer" in report.error
    assert run.manager.must_stop
    with pytest.raises(CheckpointError) as caught:
        run.save(2)
    assert caught.value.expected == "all ranks finish a save together"
    assert caught.value.where == "saving step 1"
    assert "launch again" in caught.value.action
