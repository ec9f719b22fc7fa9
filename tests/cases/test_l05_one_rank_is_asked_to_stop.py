# SPDX-License-Identifier: Apache-2.0
"""Case L05: preemption without a save, or one rank left alone and the others hung until SIGKILL.

Reports: kyutai-labs/pocket-tts#277, NVIDIA-NeMo/Automodel#3007, NVIDIA-NeMo/Automodel#405.
"""

import os
import random
import signal
import time

import psutil
import pytest

from tests.fix64 import RECIPE, options
from tests.launching import launch, start
from tests.reading import assert_same_run, attempt_lines, checkpoint_steps, run_json

pytestmark = pytest.mark.launch
NUM_STEPS = 500
LONG = {
    "max_steps": NUM_STEPS, "save_steps": NUM_STEPS, "per_device_train_batch_size": 2,
    "checkpoint": None, "keep_last": 30,
}  # fmt: skip
LIMIT_SECONDS = 20
SEED = random.SystemRandom().randrange(1 << 32)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, fix64):
    """The run that nobody stopped."""
    run = tmp_path_factory.mktemp("l05") / "run"
    done = launch(RECIPE, options(fix64, run, **LONG), num_processes=2)
    assert done.returncode == 0, done.output
    return run


def stop(run, words, request, env=None):
    """Launches, makes the request in this attempt, and gives the attempt's last step.

    All ranks are gone in time with the documented code, and the newest checkpoint is of that step.
    """
    attempt = len(run_json(run)["attempts"]) if run.exists() else 0
    journal = run / "journal" / f"attempt-{attempt:04d}.jsonl"
    with start(RECIPE, words, num_processes=2, env=env) as running:
        running.wait_until(lambda: journal.exists() and len(attempt_lines(run, attempt)) > 0)
        workers = running.workers()
        assert sorted(workers) == [0, 1]
        request(running, workers)
        began = time.monotonic()
        left = psutil.wait_procs([*workers.values()], timeout=LIMIT_SECONDS)[1]
        assert left == [], f"seed {SEED}: {running.output()}"
        assert time.monotonic() - began < LIMIT_SECONDS
        done = running.finish()
    assert done.returncode != 0
    entry = run_json(run)["attempts"][-1]
    assert (entry["outcome"], entry["exit_code"]) == ("preempted", 75), done.output
    assert not list((run / "failures").glob("*")), "a rank did not end with 75"
    last = attempt_lines(run, attempt)[-1]["step"]
    assert entry["step"] == last == checkpoint_steps(run)[-1] < NUM_STEPS
    return last


def at_random(number):
    """SIGTERM to one rank, up to half a second after the first step."""
    draws = random.Random(SEED + number)

    def request(running, workers):
        until, rank = time.monotonic() + draws.uniform(0.0, 0.5), draws.randrange(2)
        running.wait_until(lambda: time.monotonic() >= until)
        workers[rank].send_signal(signal.SIGTERM)

    return request


def twice(running, workers):
    """Three requests to rank 1, a moment apart."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
        os.kill(workers[1].pid, number)
        until = time.monotonic() + 0.01
        running.wait_until(lambda until=until: time.monotonic() >= until)


def ends_as(run, words, whole):
    """The run is left alone, and ends as the one that nobody stopped."""
    done = launch(RECIPE, words, num_processes=2)
    assert done.returncode == 0, done.output
    assert_same_run(run, whole)


def test_l05_at_random_twice_and_amid_a_save(tmp_path, fix64, whole):
    """Each time all ranks save the same last step and exit with 75; the end is that of REF."""
    run = tmp_path / "run"
    words = options(fix64, run, **LONG)
    stop(run, words, at_random(0))
    stop(run, words, at_random(1))
    stop(run, words, twice)
    # SAVE asks for a save, in the middle of which rank 1 gets the signal, and it lasts a while.
    fault = "terminate@save.before_file@rank1,slow@save.before_sync"
    last = stop(run, words, lambda *_: (run / "SAVE").touch(), env={"MPRECIPES_FAULT": fault})
    assert not (run / "SAVE").exists()
    *_, asked, newest = checkpoint_steps(run)
    assert asked < newest == last  # the save that was in flight was finished, then its own made
    ends_as(run, words, whole)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_l05_ten_times_at_random(tmp_path, fix64, whole):
    """Ten trials in one run."""
    run = tmp_path / "run"
    words = options(fix64, run, **LONG)
    for number in range(10):
        stop(run, words, at_random(number))
    ends_as(run, words, whole)
