# SPDX-License-Identifier: Apache-2.0
"""What is read from a run folder are the numbers that were written, and nothing is made up."""

import json

import pytest

from mprecipes.errors import ConfigError
from mprecipes.tools.run_records import read_record, smooth
from tests.made_runs import TOKENS, course, make_run


def test_the_ends_of_a_run(tmp_path):
    """Final loss, speed, memory and digest are the ones in the files."""
    run = read_record(make_run(tmp_path / "run", mode="bf16", seed=3, tokens_per_second=500.0))
    assert (run.arm, run.mode, run.seed, run.label) == ("bf16", "bf16", 3, "bf16, seed 3")
    assert run.is_complete and run.outcome == "finished"
    assert run.final_loss == course(60, 3) + 0.05
    assert run.tokens_per_second == pytest.approx(500.0)
    assert run.memory == ("host", 700 << 20)
    assert run.initial_weights == f"{3:016x}"
    assert run.seconds[60] == pytest.approx(60 * TOKENS / 500.0)


def test_the_area_is_the_mean_height_of_the_curve(tmp_path):
    """By hand: trapezoids of a curve evaluated at 0, 30 and 60."""
    run = read_record(make_run(tmp_path / "run", eval_steps=30))
    a, b, c = course(0, 0), course(30, 0) + 0.05, course(60, 0) + 0.05
    assert run.area == pytest.approx(((a + b) / 2 * 30 + (b + c) / 2 * 30) / 60)


def test_saves_cost_and_are_told_apart(tmp_path):
    """12 s of a save among 55 steps of 2.04 s: in one rate, not in the other."""
    run = read_record(make_run(tmp_path / "run", stall_seconds=12.0))
    assert run.tokens_per_second == pytest.approx(1000.0)
    with_saves = 55 * TOKENS / (55 * 2.04 + 12.0)
    assert run.tokens_per_second_with_saves == pytest.approx(with_saves)


def test_a_slow_beginning_is_no_throughput(tmp_path):
    """Five steps of an hour each, at the beginning of the only attempt, change no rate."""
    run = make_run(tmp_path / "run")
    path = run / "journal" / "attempt-0000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:5]:
        row["step_seconds"] = 3600.0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = read_record(run)
    assert record.tokens_per_second == pytest.approx(1000.0)
    assert record.tokens_per_second_with_saves == pytest.approx(1000.0)


def test_the_newest_pass_of_a_step_counts(tmp_path):
    """After a resume from step 40, steps 41 to 60 of the second attempt are the run's."""
    run = make_run(tmp_path / "run")
    lines = (run / "journal" / "attempt-0000.jsonl").read_text().splitlines()
    rows = [{**json.loads(line), "attempt": 1, "loss": 9.0} for line in lines[40:]]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "journal" / "attempt-0001.jsonl").write_text(text)
    record = read_record(run)
    assert [r.loss for r in record.steps[40:]] == [9.0] * 20
    assert record.steps[39].loss == course(40, 0)


def test_a_run_cut_short_has_no_final_loss(tmp_path):
    """30 of 60 steps: neither an end nor an area."""
    run = read_record(make_run(tmp_path / "run", num_steps=30, horizon=60, outcome="preempted"))
    assert not run.is_complete
    assert run.final_loss is None and run.area is None


def test_without_held_out_data_the_training_loss_stands_in(tmp_path):
    """The smoothed training loss, and it is called so."""
    run = read_record(make_run(tmp_path / "run", eval_steps=None))
    assert run.loss_kind == "training"
    assert run.final_loss == pytest.approx(sum(course(s, 0) for s in range(55, 61)) / 6)


def test_an_evaluation_before_the_last_step_is_no_end(tmp_path):
    """Evaluated at 40 of 60 last: that is not the loss of the run's end."""
    assert read_record(make_run(tmp_path / "run", eval_steps=40)).final_loss is None


def test_time_to_a_loss_is_interpolated(tmp_path):
    """Half way between two evaluations, by the loss, is half way in time."""
    run = read_record(make_run(tmp_path / "run"))
    middle = (run.heldout[10] + run.heldout[20]) / 2
    assert run.seconds_to(middle) == pytest.approx(15 * 2.04)
    assert run.seconds_to(0.5) is None


def test_two_beginnings_in_one_folder_are_refused(tmp_path):
    """Attempts that began with different weights are two trainings."""
    run = make_run(tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    facts["attempts"] += [{**facts["attempts"][0], "attempt": 1, "initial_weights": "ff" * 8}]
    (run / "run.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError) as refused:
        read_record(run)
    assert refused.value.found.endswith("0000000000000000, ffffffffffffffff")
    assert "the same weights" in refused.value.expected
    assert refused.value.where.endswith("run.json")
    assert "new folder" in refused.value.action


def test_smoothing_is_a_mean_over_what_came_before():
    """A tenth of 20 steps is 2."""
    assert smooth({1: 1.0, 2: 3.0, 3: 5.0}, 20) == {1: 1.0, 2: 2.0, 3: 4.0}


def test_what_is_damaged_is_left_out_or_named(tmp_path):
    """A metric that is no number, a resume report that is no report, a run without an attempt."""
    run = make_run(tmp_path / "run", num_steps=20)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 20, "eval/loss": null, "perf/host_memory_bytes": [1]}\n')
        file.write('{"step": 20, "perf/ho')
    (run / "resume").mkdir()
    (run / "resume" / "attempt-0001.json").write_text("{")
    (run / "resume" / "attempt-0002.json").write_text("[]")
    record = read_record(run)
    assert record.final_loss == course(20, 0) + 0.05
    assert record.memory == ("host", 700 << 20)
    assert [(r["verdict"], r["checkpoint"]) for r in record.resumes] == [
        ("unreadable", "attempt-0001.json"), ("unreadable", "attempt-0002.json"),
    ]  # fmt: skip
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "attempts": []}))
    with pytest.raises(ConfigError) as refused:
        read_record(run)
    assert refused.value.found == "no attempt"
    assert refused.value.where.endswith("run.json")
    assert refused.value.expected and refused.value.action
