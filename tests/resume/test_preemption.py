# SPDX-License-Identifier: Apache-2.0
"""Every way of being asked to stop, one after the other in one run of two processes.

Each launch into the run is stopped another way once its journal has a step of its own; the last is
left alone. 400 steps are too many to be done before the request arrives.
"""

import os
import re
import signal
import time

import psutil
import pytest

from tests.fix64 import RECIPE, options, write_rows
from tests.launching import launch, run_command, start
from tests.reading import (
    assert_released,
    assert_same_run,
    attempt_lines,
    checkpoint_steps,
    outcomes,
    resume_report,
    run_json,
)

pytestmark = pytest.mark.launch

NUM_STEPS = 400
CHANGED = {
    "max_steps": NUM_STEPS,
    "save_steps": NUM_STEPS,
    "keep_last": 9,
    "eval_fraction": 0.2,
    "eval_steps": 10,
    "per_device_train_batch_size": 2,
}


def ask(number, rank):
    """Gives a request to stop: a signal to one rank."""
    return lambda running: os.kill(running.workers()[rank].pid, number)


REQUESTS = {
    "SIGTERM to the launcher": lambda running: running.process.terminate(),
    "SIGTERM to rank 1": ask(signal.SIGTERM, 1),
    "SIGUSR1 to rank 0": ask(signal.SIGUSR1, 0),
    "SIGINT to rank 1": ask(signal.SIGINT, 1),
    "a file STOP": None,
    "SIGTERM amid an evaluation": lambda running: None,  # planted below
    "SIGKILL to the launcher": lambda running: running.process.kill(),
}

# Once one rank is gone the launcher sends SIGTERM to the others: here while rank 0 is writing.
FAULTS = {
    "SIGTERM to rank 1": {"MPRECIPES_FAULT": "terminate@run.before_outcome@rank0"},
    "SIGTERM amid an evaluation": {"MPRECIPES_FAULT": "terminate@eval.batch@rank1"},
}


def stopped(run, words, attempt, request, env):
    """Launches, makes the request after a step of this attempt; gives what was printed."""
    journal = run / "journal" / f"attempt-{attempt:04d}.jsonl"
    with start(RECIPE, words, num_processes=2, env=env) as running:
        running.wait_until(lambda: journal.exists() and len(attempt_lines(run, attempt)) > 0)
        assert sorted(running.workers()) == [0, 1]
        workers = [*running.workers().values()]
        if request is None:
            (run / "STOP").touch()
        else:
            request(running)
        done = running.finish()
        assert psutil.wait_procs(workers, timeout=60)[1] == [], done.output
        return done


@pytest.fixture(scope="module")
def whole(tmp_path_factory, fix64):
    """The run that nobody stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = launch(RECIPE, options(fix64, run, **CHANGED), num_processes=2)
    assert done.returncode == 0, done.output
    assert re.search(r"a stop needs about \d+\.\d s, .* at [\d,]+ MB/s, measured here", done.output)
    assert done.output.count("a stop needs up to ") == 1
    return run


def test_every_request_saves_and_the_next_launch_goes_on(tmp_path, fix64, whole):
    """Seven requests, each exit 75 at a saved step; the end is that of the run left alone."""
    run = tmp_path / "run"
    words = options(fix64, run, **CHANGED)
    for attempt, (name, request) in enumerate(REQUESTS.items()):
        done = stopped(run, words, attempt, request, FAULTS.get(name, {}))
        entry = run_json(run)["attempts"][-1]
        assert (entry["outcome"], entry["exit_code"]) == ("preempted", 75), (name, done.output)
        assert entry["error"].startswith("rank 0: Preempted: step "), name
        assert done.returncode != 0, name
        step = attempt_lines(run, attempt)[-1]["step"]
        assert entry["step"] == step < NUM_STEPS, name
        assert checkpoint_steps(run)[-1] == step, name
        assert not (run / "lease.json").exists(), name
        assert not (run / "STOP").exists(), name
        assert ("asked to stop (a file STOP)" in entry["error"]) == (name == "a file STOP")
        if name == "SIGTERM amid an evaluation":
            assert step % 10 == 1  # the evaluation was of the step before
        assert not list((run / "failures").glob("*")), name
    status = run_command(["mprecipes", "status", run])
    assert status.returncode == 75, status.output
    assert "preempted" in status.output
    done = launch(RECIPE, words, num_processes=2)
    assert done.returncode == 0, done.output
    assert outcomes(run) == ["preempted"] * 7 + ["finished"]
    for attempt in range(1, 8):
        report = resume_report(run, attempt)
        last = attempt_lines(run, attempt - 1)[-1]["step"]
        assert report["step"] == last
        assert_released(report)
        assert attempt_lines(run, attempt)[0]["step"] == last + 1
    assert_same_run(run, whole)


def test_asked_to_stop_while_data_is_prepared(tmp_path):
    """A SIGTERM amid 300,000 documents ends in 75, and no part of them is published."""
    run, cache = tmp_path / "run", tmp_path / "cache"
    data = write_rows(tmp_path / "rows.jsonl", 300_000)
    words = options(data, run, max_steps=2)
    with start(RECIPE, words, num_processes=2, env={"MPRECIPES_CACHE": str(cache)}) as running:
        running.wait_until(lambda: "rows.jsonl ..." in running.output())
        running.process.terminate()
        done = running.finish()
    assert done.returncode != 0
    (entry,) = run_json(run)["attempts"]
    assert (entry["outcome"], entry["exit_code"]) == ("preempted", 75), done.output
    assert "asked to stop before its data was prepared" in entry["error"]
    assert entry["step"] == 0
    assert list(cache.glob("packed/*/manifest.json")) == []
    assert not (run / "journal").exists()


def test_asked_to_stop_by_a_file_while_data_is_prepared(tmp_path):
    """STOP ends the preparation too, with 75, and the next launch is not stopped by it."""
    run, cache = tmp_path / "run", tmp_path / "cache"
    data = write_rows(tmp_path / "rows.jsonl", 300_000)
    with start(
        RECIPE, options(data, run, max_steps=2), env={"MPRECIPES_CACHE": str(cache)}
    ) as running:
        running.wait_until(lambda: "rows.jsonl ..." in running.output())
        (run / "STOP").touch()
        running.finish()
    (entry,) = run_json(run)["attempts"]
    assert (entry["outcome"], entry["exit_code"], entry["step"]) == ("preempted", 75, 0)
    assert not (run / "STOP").exists()


def test_a_second_interrupt_after_three_seconds_forces_the_end(tmp_path, fix64):
    """A first SIGINT waits for a step that does not end; the one 3 s later does not wait."""
    run = tmp_path / "run"
    fault = ",".join(["slow@step:3"] * 240)  # 120 seconds
    with start(RECIPE, options(fix64, run), env={"MPRECIPES_FAULT": fault}) as running:
        journal = run / "journal" / "attempt-0000.jsonl"
        running.wait_until(lambda: journal.exists() and len(attempt_lines(run, 0)) == 3)
        worker = running.workers()[0]
        began = time.monotonic()
        worker.send_signal(signal.SIGINT)
        running.wait_until(lambda: time.monotonic() - began >= 1)
        worker.send_signal(signal.SIGINT)  # as from the terminal and from the launcher
        running.wait_until(lambda: time.monotonic() - began >= 3.2)
        assert worker.is_running()
        worker.send_signal(signal.SIGINT)
        running.finish()
    assert time.monotonic() - began < 100
    (entry,) = run_json(run)["attempts"]
    assert (entry["outcome"], entry["exit_code"]) == ("interrupted", 130)
