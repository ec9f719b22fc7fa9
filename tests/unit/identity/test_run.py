# SPDX-License-Identifier: Apache-2.0
"""A run folder has one writer, one history, and the truth about how each attempt ended."""

import json
import multiprocessing
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from mprecipes.errors import (
    ConfigError,
    NumericsError,
    OutOfMemory,
    Preempted,
    RunFinished,
    RunFolderBusy,
)
from mprecipes.faults import VARIABLE
from mprecipes.identity import lease as lease_module
from mprecipes.identity.config import Origins
from mprecipes.identity.history import read_run, status_code
from mprecipes.identity.recipe import RecipeIdentity
from mprecipes.identity.run import open_folder

fork = multiprocessing.get_context("fork")
IDENTITY = RecipeIdentity("train_thing", "1.0.0", None, "ab" * 32, "own", None)
PARTS = {"expected": "b", "where": "c", "action": "d"}


@dataclass
class Group:
    """Ranks whose main process is played first; `said` is what it told the others."""

    rank: int = 0
    world_size: int = 1
    said: list[Any] = field(default_factory=list)
    writers: tuple[int, ...] = (0,)

    @property
    def is_main(self):
        return self.rank == 0

    writes_here = is_main

    def writers_first(self, error, value=None):
        if self.is_main:
            self.said[:] = [error, value]
        error, value = self.said
        if error is not None:
            raise error
        return value


def launch(folder, *, horizon=10, ranks=None, source=Path(__file__), config=None, origins=None):
    config = config or {"max_steps": horizon, "tokenizer": "none"}
    return open_folder(
        folder,
        recipe=IDENTITY,
        source=source,
        config=config,
        origins=origins or dict.fromkeys(config, "default"),
        horizon=horizon,
        ranks=ranks or Group(),
    )


def attempts(folder):
    return json.loads((folder / "run.json").read_text())["attempts"]


def test_first_attempt_writes_who_it_is_and_what_runs(tmp_path):
    """Inside the block run.json, recipe.py, config.yaml and a live lease are there."""
    folder = tmp_path / "new" / "run"
    with launch(folder) as run:
        facts = json.loads((folder / "run.json").read_text())
        assert list(facts) == [
            "schema", "run_id", "wandb_id", "recipe", "created", "horizon", "attempts",
        ]  # fmt: skip
        assert facts["schema"] == 1
        assert facts["run_id"] == run.run_id
        assert len(run.run_id) == 12
        assert int(run.run_id, 16) >= 0
        assert facts["wandb_id"] == run.wandb_id
        assert facts["recipe"] == IDENTITY.to_dict()
        assert facts["attempts"][0]["outcome"] is None
        assert facts["attempts"][0]["recipe"] == "train_thing@1.0.0#abababab"
        assert (run.attempt, run.is_main, run.path) == (0, True, folder)
        assert run.recipe == IDENTITY
        assert (folder / "recipe.py").read_bytes() == Path(__file__).read_bytes()
        config = 'max_steps: 10      # default\ntokenizer: "none"  # default\n'
        assert (folder / "config.yaml").read_text() == config
        assert read_run(folder).is_running
    assert attempts(folder)[0]["outcome"] == "finished"
    assert not (folder / "lease.json").exists()


def test_folders_of_a_run(tmp_path):
    """Each part of a run has its documented place, made by whoever fills it."""
    with launch(tmp_path / "run") as run:
        names = ("checkpoints", "journal", "quarantine", "milestones", "resume_reports", "reports")
        places = [getattr(run, name).relative_to(run.path).as_posix() for name in names]
    expected = ["checkpoints", "journal", "quarantine", "milestones", "resume", "reports"]
    assert places == expected


def test_later_attempts_keep_their_own_source_and_config(tmp_path):
    """Attempt n keeps recipe.attempt-n.py and config.attempt-n.yaml; run id and history stay."""
    source = tmp_path / "r.py"
    ids = set()
    for number in range(3):
        source.write_text(f"x = {number}\n")
        with pytest.raises(Preempted), launch(tmp_path / "run", source=source) as run:
            assert run.attempt == number
            ids.add((run.run_id, run.wandb_id))
            raise Preempted("a", **PARTS)
    assert len(ids) == 1
    assert [item["outcome"] for item in attempts(tmp_path / "run")] == ["preempted"] * 3
    assert (tmp_path / "run" / "recipe.py").read_text() == "x = 0\n"
    assert (tmp_path / "run" / "recipe.attempt-1.py").read_text() == "x = 1\n"
    assert (tmp_path / "run" / "recipe.attempt-2.py").read_text() == "x = 2\n"
    assert (tmp_path / "run" / "config.attempt-2.yaml").exists()


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (Preempted("a", **PARTS), "preempted", 75),
        (NumericsError("a", **PARTS), "numerics", 5),
        (KeyboardInterrupt(), "interrupted", 130),
        (ZeroDivisionError("x"), "crashed", 1),
    ],
)
def test_end_is_recorded_and_the_error_passes(tmp_path, error, outcome, code):
    """The exception that ended the attempt is recorded and comes out unchanged."""
    with pytest.raises(type(error)) as caught, launch(tmp_path / "run") as run:
        run.step = 7
        raise error
    assert caught.value is error
    last = attempts(tmp_path / "run")[-1]
    assert (last["outcome"], last["exit_code"], last["step"]) == (outcome, code, 7)
    assert last["error"].startswith(f"rank 0: {type(error).__name__}")
    assert last["ended"] >= last["started"]
    info = read_run(tmp_path / "run")
    assert (info.outcome, status_code(info), info.is_running) == (outcome, code, False)


def test_out_of_memory_is_a_named_outcome_with_advice(tmp_path):
    """torch's out-of-memory is recorded as such and raised as ours, with what to try."""
    config = {"per_device_train_batch_size": 4}
    with pytest.raises(OutOfMemory) as caught, launch(tmp_path / "run", config=config) as run:
        run.step = 3
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    entry = attempts(tmp_path / "run")[0]
    assert entry["outcome"] == "out_of_memory"
    assert entry["error"] == f"rank 0: OutOfMemory: {caught.value}"
    assert caught.value.found == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert caught.value.expected.startswith("memory for parameters")
    assert caught.value.where == "rank 0, after step 3"
    assert "--per_device_train_batch_size 2" in caught.value.action
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_facts_are_merged_into_this_attempt(tmp_path):
    """`record` adds to the current entry at once and leaves earlier entries alone."""
    folder = tmp_path / "run"
    with pytest.raises(Preempted), launch(folder) as run:
        run.record(tokenizer="bytes")
        raise Preempted("a", **PARTS)
    with launch(folder) as run:
        run.record(step=4, checkpoint="step-00000004")
        run.record(loss=2.5)
        now = attempts(folder)[1]
        assert (now["step"], now["checkpoint"], now["loss"]) == (4, "step-00000004", 2.5)
        assert run.step == 4
    assert "loss" not in attempts(folder)[0]
    assert attempts(folder)[0]["tokenizer"] == "bytes"


def test_no_absolute_path_is_written_into_run_json(tmp_path):
    """A folder that is moved does not carry the old machine's paths along."""
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="cannot read"), launch(folder) as run:
        run.record(data={"source": str(tmp_path / "data.txt")})
        raise ValueError(f"cannot read {tmp_path}/data.txt in {os.getcwd()}/x")
    text = (folder / "run.json").read_text()
    assert "/tmp/" not in text
    assert str(tmp_path.parent) not in text
    assert ".../data.txt" in text
    os.rename(folder, tmp_path / "moved")
    with launch(tmp_path / "moved") as run:
        assert run.attempt == 1


def test_finished_run_is_not_run_again(tmp_path):
    """The same horizon again says finished, exit code 0, and changes nothing."""
    folder = tmp_path / "run"
    with launch(folder):
        pass
    before = (folder / "run.json").read_bytes()
    with pytest.raises(RunFinished) as caught, launch(folder):
        pytest.fail("the run must not start")
    assert caught.value.exit_code == 0
    assert caught.value.found.startswith("this run finished all 10 steps at 20")
    assert caught.value.expected == "nothing more to do"
    assert caught.value.where == str(folder)
    assert "--max_steps" in caught.value.action
    assert (folder / "run.json").read_bytes() == before
    assert not (folder / "lease.json").exists()


def test_a_finished_run_can_go_back_to_a_step_once(tmp_path):
    """--resume_from opens it again; the same command after that says that it is finished."""
    folder, origins = (
        tmp_path / "run",
        Origins(dict.fromkeys(("max_steps", "tokenizer"), "default")),
    )
    with launch(folder):
        pass
    origins.resume_from = 5
    with launch(folder, origins=origins) as run:
        run.record(resume_from=5)
    with pytest.raises(RunFinished), launch(folder, origins=origins):
        pass


def test_longer_horizon_goes_on_and_a_refused_one_is_forgotten(tmp_path):
    """Another horizon opens the folder; if it is refused, the run counts as finished again."""
    folder = tmp_path / "run"
    with launch(folder):
        pass
    with pytest.raises(ConfigError), launch(folder, horizon=20) as run:
        assert run.attempt == 1
        raise ConfigError("max_steps 10 -> 20", **PARTS)
    assert json.loads((folder / "run.json").read_text())["horizon"] == 10
    with pytest.raises(RunFinished), launch(folder, horizon=10):
        pass
    with launch(folder, horizon=20):
        pass
    assert json.loads((folder / "run.json").read_text())["horizon"] == 20


def test_a_new_run_may_begin_with_a_checkpoint_of_another(tmp_path):
    """As docs/checkpoints.md says: its folder copied to checkpoints/, and nothing else there."""
    step = tmp_path / "checkpoints" / "step-00000004"
    step.mkdir(parents=True)
    with pytest.raises(ConfigError), launch(tmp_path):
        pytest.fail("a folder without a manifest is somebody's")
    (step / "manifest.json").write_text("{}")
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError) as caught, launch(tmp_path):
        pytest.fail("the run must not start")
    assert "2 other files and no run.json: checkpoints, thesis.tex" in caught.value.found
    (tmp_path / "thesis.tex").unlink()
    with launch(tmp_path) as run:
        assert run.attempt == 0


def test_foreign_folder_is_refused_and_left_alone(tmp_path):
    """A folder with other files and no run is refused by name and not written to."""
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError) as caught, launch(tmp_path):
        pytest.fail("the run must not start")
    assert caught.value.found == "the folder holds 1 other files and no run.json: thesis.tex"
    assert caught.value.expected == (
        "a folder that is new, empty, a run's own, or holds checkpoints/ alone"
    )
    assert caught.value.where == f"output_dir {tmp_path}"
    assert caught.value.action == "use a new --output_dir"
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_damaged_run_json_is_refused_and_kept(tmp_path):
    """A torn run.json is never overwritten, and the lease is given back."""
    (tmp_path / "run.json").write_text('{"schema": 1, "run')
    with pytest.raises(ConfigError) as caught, launch(tmp_path):
        pytest.fail("the run must not start")
    assert caught.value.found.startswith("run.json is damaged")
    assert (tmp_path / "run.json").read_text() == '{"schema": 1, "run'
    assert not (tmp_path / "lease.json").exists()


def test_a_torn_failure_record_does_not_stop_the_next_launch(tmp_path):
    """A run that was killed while another rank wrote its failure can be launched again."""
    folder = tmp_path / "run"
    with launch(folder):
        pass
    facts = json.loads((folder / "run.json").read_text())
    facts["attempts"][0] |= {"outcome": None, "exit_code": None}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "failures").mkdir()
    (folder / "failures" / "attempt-0000-rank-1.json").write_text('{"rank": 1, "outc')
    with launch(folder) as run:
        assert run.attempt == 1
    assert [each["outcome"] for each in attempts(folder)] == ["killed", "finished"]


def test_output_dir_that_is_a_file_is_refused(tmp_path):
    """A path that cannot be a folder is refused with what was wrong with it."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError) as caught, launch(tmp_path / "file"):
        pytest.fail("the run must not start")
    assert caught.value.found == "File exists (file)"
    assert caught.value.expected.startswith("a folder that can be made and written")
    assert str(tmp_path / "file") in caught.value.where
    assert caught.value.action.startswith("use another --output_dir")


def test_busy_folder_is_refused_while_its_run_goes_on(tmp_path):
    """A second launch inside a live one is refused and does not disturb it."""
    folder = tmp_path / "run"
    with launch(folder):
        with pytest.raises(RunFolderBusy) as caught, launch(folder):
            pytest.fail("the run must not start")
        assert f"process {os.getpid()} on " in caught.value.found
        assert caught.value.where == str(folder / "lease.json")
        assert len(attempts(folder)) == 1
        assert read_run(folder).is_running
    assert attempts(folder)[0]["outcome"] == "finished"


def race(folder, start, results, release):
    start.wait()
    try:
        with launch(folder):
            results.put("won")
            release.wait()
    except RunFolderBusy:
        results.put("busy")


def test_two_simultaneous_first_launches(tmp_path):
    """Of two launches into one new folder one runs, one is told who runs, the folder is whole."""
    for number in range(8):
        folder = tmp_path / str(number)
        start, release, results = fork.Barrier(2), fork.Event(), fork.Queue()
        racers = [
            fork.Process(target=race, args=(folder, start, results, release)) for _ in range(2)
        ]
        for racer in racers:
            racer.start()
        found = sorted(results.get(timeout=30) for _ in racers)
        release.set()
        for racer in racers:
            racer.join()
        assert found == ["busy", "won"]
        assert [racer.exitcode for racer in racers] == [0, 0]
        assert [item["outcome"] for item in attempts(folder)] == ["finished"]


def run_and_die(folder, fault):
    os.environ[VARIABLE] = fault
    with launch(folder) as run:
        run.step = 5
        run.record()
        raise Preempted("a", **PARTS)


@pytest.mark.parametrize(
    ("fault", "number", "outcomes"),
    [
        ("kill@run.after_lease", 0, ["finished"]),
        ("kill@run.before_outcome", 1, ["killed", "finished"]),
    ],
)
def test_killed_attempt_is_taken_over_and_noted(tmp_path, fault, number, outcomes):
    """After SIGKILL the next launch takes the folder at once and records how the last ended."""
    process = fork.Process(target=run_and_die, args=(tmp_path / "run", fault))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with launch(tmp_path / "run") as run:
        assert run.attempt == number
    found = attempts(tmp_path / "run")
    assert [item["outcome"] for item in found] == outcomes
    assert found[-1]["lease_taken_from"].startswith(f"process {process.pid} on ")
    if number:
        assert (found[0]["exit_code"], found[0]["step"]) == (1, 5)
        assert found[0]["error"] == "the process ended without recording how"
        assert found[0]["ended"] is not None


def test_other_ranks_get_the_same_run_and_write_only_failures(tmp_path):
    """Rank 1 sees the run of rank 0, holds no lease, and records only its own failure."""
    folder, main = tmp_path / "run", Group(world_size=2)
    with pytest.raises(Preempted), launch(folder, ranks=main) as run:
        before = (folder / "run.json").read_bytes()
        other_rank = Group(rank=1, world_size=2, said=main.said)
        with pytest.raises(NumericsError), launch(folder, ranks=other_rank) as other:
            assert (other.run_id, other.attempt, other.is_main) == (run.run_id, 0, False)
            other.step = 9
            other.record(loss=1.0)
            other.check_lease()
            raise NumericsError("loss is nan", **PARTS)
        with pytest.raises(Preempted), launch(folder, ranks=other_rank):
            raise Preempted("a", **PARTS)
        assert (folder / "run.json").read_bytes() == before
        assert (folder / "lease.json").exists()
        raise Preempted("a", **PARTS)
    assert attempts(folder)[0]["world_size"] == 2
    assert os.listdir(folder / "failures") == ["attempt-0000-rank-1.json"]
    failure = json.loads((folder / "failures" / "attempt-0000-rank-1.json").read_text())
    assert (failure["outcome"], failure["exit_code"], failure["step"]) == ("numerics", 5, 9)
    assert failure["error"].startswith("rank 1: NumericsError: c: loss is nan")
    assert "NumericsError" in failure["traceback"][-1]
    assert str(tmp_path) not in json.dumps(failure)


def test_a_crash_of_rank_0_is_told_by_the_rank_that_failed_first(tmp_path):
    """Rank 1 ran out of memory; the broken connection of rank 0 is only what came of it."""
    folder, main = tmp_path / "run", Group(world_size=2)
    with pytest.raises(RuntimeError), launch(folder, ranks=main) as run:
        other_rank = Group(rank=1, world_size=2, said=main.said)
        with pytest.raises(OutOfMemory), launch(folder, ranks=other_rank) as other:
            other.step = 9
            raise torch.OutOfMemoryError("CUDA out of memory")
        run.step = 9
        raise RuntimeError("Connection closed by peer")
    (entry,) = attempts(folder)
    assert (entry["outcome"], entry["exit_code"], entry["failed_rank"]) == ("out_of_memory", 1, 1)
    assert "rank 1: OutOfMemory: rank 1, after step 9: CUDA out of" in entry["error"]
    assert "next: take shorter sequences" in entry["error"]
    with pytest.raises(RuntimeError), launch(folder, ranks=Group()):
        raise RuntimeError("its own")
    assert attempts(folder)[1]["error"] == "rank 0: RuntimeError: its own"


def test_other_ranks_raise_the_error_of_rank_0(tmp_path):
    """When rank 0 cannot open the folder every rank raises its error, and nothing is written."""
    (tmp_path / "thesis.tex").write_text("x")
    main = Group(world_size=2)
    for rank in (main, Group(rank=1, world_size=2, said=main.said)):
        with pytest.raises(ConfigError, match=r"thesis\.tex"), launch(tmp_path, ranks=rank):
            pytest.fail("the run must not start")
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_failed_heartbeats_are_counted_in_run_json(tmp_path, monkeypatch):
    """A run whose heartbeat could not be written goes on, and says how often it failed."""

    def broken(path, value):
        raise OSError(5, "planted")

    with launch(tmp_path / "run") as run:
        with monkeypatch.context() as patch:
            patch.setattr(lease_module, "write_json_atomically", broken)
            run._book.lease.beat()
    last = attempts(tmp_path / "run")[0]
    assert (last["outcome"], last["failed_heartbeats"]) == ("finished", 1)


def test_a_lost_folder_is_not_written_to(tmp_path):
    """A run that was taken for dead finds out before it writes, and leaves the new owner's file."""
    folder = tmp_path / "run"
    with launch(folder) as run:
        lease = json.loads((folder / "lease.json").read_text())
        (folder / "lease.json").write_text(json.dumps(lease | {"token": "x", "host": "elsewhere"}))
        (folder / "run.json").write_text("the new owner's")
        for write in (run.check_lease, run.record):
            with pytest.raises(RunFolderBusy) as caught:
                write()
            assert "on elsewhere" in caught.value.found
    assert (folder / "run.json").read_text() == "the new owner's"
    assert (folder / "lease.json").exists()


def test_outcome_that_cannot_be_written_hides_no_error(tmp_path, monkeypatch, caplog):
    """A full disk at the very end changes neither the error of the run nor a finished one."""
    folder = tmp_path / "run"

    def broken(path, value):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError), launch(folder):
        patch.setattr("mprecipes.identity.run.write_json_atomically", broken)
        raise ZeroDivisionError
    assert "outcome crashed of this attempt is not recorded" in caplog.text
    assert read_run(folder).outcome == "killed"
    assert not (folder / "lease.json").exists()
