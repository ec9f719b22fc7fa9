# SPDX-License-Identifier: Apache-2.0
"""A planted loss spike: the run stops, or goes back and on without its samples, whatever happens.

96 rows of one letter, except those of steps 15 and 16, which are noise: the first is trained on and
saved, at the second the run turns back to step 10. Each run is a real launch.
"""

import json
import random

import pytest

from mprecipes import SampleOrder
from tests import reading
from tests.fix64 import RECIPE, options
from tests.launching import launch

NUM_ROWS, BATCH, SPIKE = 96, 4, (56, 64)  # samples of steps 15 and 16
WATCH = {"on_spike": "rollback", "spike_window": 8, "spike_mads": 2.0, "spike_updates": 2}
KILL = {"MPRECIPES_FAULT": "kill@step:18"}  # made only on the way without the spike

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The data, with noise where the order of seed 1234 puts steps 15 and 16."""
    noisy = set(SampleOrder(NUM_ROWS, 1234)(SPIKE[0], SPIKE[1] - SPIKE[0]).tolist())
    draw = random.Random(7)
    texts = [
        "".join(chr(draw.randrange(33, 126)) for _ in range(15)) if row in noisy else "a" * 15
        for row in range(NUM_ROWS)
    ]
    path = tmp_path_factory.mktemp("spike") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "ascii")
    return path


def train(rows, run, *, env=None, processes=1, **watch):
    words = options(
        rows, run, max_steps=20, learning_rate=1e-2, watch=json.dumps({**WATCH, **watch}),
        per_device_train_batch_size=BATCH // processes,
    )  # fmt: skip
    return launch(RECIPE, words, env=env, num_processes=processes)


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    """The run that turned back and was never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = train(rows, run)
    assert done.returncode == 0, done.output
    return run, done.output


def test_a_spike_is_left_out(whole):
    """Steps 11 on are made of the samples without the spike; everything that is kept says so."""
    run, output = whole
    (rollback,) = reading.rollbacks(run)
    assert (rollback["step"], rollback["to_step"]) == (16, 10)
    assert (rollback["first"], rollback["end"]) == SPIKE
    made = [line["step"] for line in reading.attempt_lines(run, 0)]
    assert made == [*range(1, 16), *range(11, 21)]
    assert reading.manifest(run, 20)["skipped_samples"] == [list(SPIKE)]
    assert "skipped_samples" not in reading.manifest(run, 10)
    assert reading.manifest(run, 20)["samples_seen"] == 20 * BATCH
    lines = reading.journal(run)
    assert max(line["loss"] for step, line in lines.items() if step > 10) < 2.0
    assert reading.quarantined(run) == ["step-00000015", "step-00000015.reason.json"]
    reason = json.loads((run / "quarantine" / "step-00000015.reason.json").read_text("utf-8"))
    assert "rolled back at step 16" in reason["problems"][0]["found"]
    assert "step 16  alert: rolled back: loss" in output
    assert "went back to step 10, on without samples 56 to 63" in output


@pytest.mark.parametrize(
    "fault",
    [
        "kill@rollback.recorded",
        pytest.param("kill@rollback.begin", marks=pytest.mark.slow),
        pytest.param("kill@step:18", marks=pytest.mark.slow),
    ],
)
def test_a_resume_leaves_out_the_same_samples(rows, whole, tmp_path, fault):
    """Killed around the rollback, or three steps after the next save: equal bits at the end."""
    run = tmp_path / "run"
    assert train(rows, run, env={"MPRECIPES_FAULT": fault}).returncode != 0
    assert reading.outcomes(run) == [None]
    done = train(rows, run)
    assert done.returncode == 0, done.output
    assert len(reading.rollbacks(run)) == 1
    report = reading.resume_report(run, 1)
    resumed_from = {"kill@rollback.recorded": 10, "kill@rollback.begin": 15, "kill@step:18": 15}
    assert report["step"] == resumed_from[fault]
    reading.assert_released(report)
    assert report["replayed_steps"] == (3 if fault == "kill@step:18" else 0)
    reading.assert_same_run(run, whole[0])
    assert reading.manifest(run, 20)["skipped_samples"] == [list(SPIKE)]


def test_a_run_that_stopped_may_turn_back_later(rows, whole, tmp_path):
    """Stop: exit 5, the checkpoint from before is kept; then rollback: the same run as `whole`."""
    run = tmp_path / "run"
    done = train(rows, run, on_spike="stop")
    assert reading.outcomes(run) == ["numerics"], done.output
    assert reading.run_json(run)["attempts"][0]["exit_code"] == 5
    assert "step 16, samples 56 to 63: loss" in done.output
    assert "for 2 updates running; it began at step 15" in done.output
    assert reading.checkpoint_steps(run) == [5, 10, 15]
    done = train(rows, run)
    assert done.returncode == 0, done.output
    assert reading.resume_report(run, 1)["step"] == 15
    assert [(r["attempt"], r["step"], r["to_step"]) for r in reading.rollbacks(run)] == [
        (1, 16, 10)
    ]
    reading.assert_same_run(run, whole[0])


@pytest.mark.slow
def test_two_processes_turn_back_together(rows, whole, tmp_path):
    """Killed after the rollback and resumed, both times with two ranks: as never interrupted."""
    runs = [tmp_path / "whole", tmp_path / "cut"]
    assert train(rows, runs[0], processes=2).returncode == 0
    assert train(rows, runs[1], processes=2, env=KILL).returncode != 0
    done = train(rows, runs[1], processes=2)
    assert done.returncode == 0, done.output
    reading.assert_same_run(runs[1], runs[0])
    digests = [
        {step: line["batch_digest"] for step, line in reading.journal(run).items()}
        for run in (runs[0], whole[0])
    ]
    assert digests[0] == digests[1]
