# SPDX-License-Identifier: Apache-2.0
"""Planted modes, good and bad, get the verdict they deserve; their numbers are the planted ones."""

import json
import math

import pytest

from mprecipes.tools.compare_measures import divergence_step, judge_runs
from mprecipes.tools.run_records import read_record
from tests.made_runs import course, make_arm, make_run


@pytest.fixture
def judge(tmp_path):
    """Gives a function that judges three FP32 runs beside an arm, and gives the arm."""

    def judged(mode="bf16", seeds=(0, 1, 2), **changes):
        paths = make_arm(tmp_path, "fp32") + make_arm(tmp_path / "arm", mode, seeds, **changes)
        arms = judge_runs([read_record(path) for path in paths])
        assert [arm.name for arm in arms] == ["fp32", mode]
        assert arms[0].verdict.word == "reference"
        return arms[1]

    return judged


def test_equal_losses_and_twice_the_speed(judge):
    """Differences of a ten-thousandth, 2.00x: equivalent."""
    arm = judge(above=[1e-4, -1e-4, 0.0], tokens_per_second=[2000.0, 2010.0, 1990.0])
    assert arm.verdict.word == "equivalent"
    assert "faster (2.00x" in arm.verdict.reason
    assert arm.measures["loss_difference"]["by_seed"]["0"] == pytest.approx(1e-4)
    assert arm.measures["seconds_to_fp32_loss"]["mean"] < 62


def test_faster_and_a_little_worse(judge):
    """0.06 nats above at the end, in every seed: worse, 3 % of the loss is no divergence."""
    arm = judge(above=[0.06, 0.061, 0.059], tokens_per_second=2000.0)
    assert arm.verdict.word == "faster but worse"
    gap = arm.measures["largest_gap"]
    assert (gap["step"], gap["seed"]) == (60, 1)
    assert gap["value"] == pytest.approx(0.061)
    assert arm.measures["seconds_to_fp32_loss"]["mean"] is None


def test_gradients_lost_to_underflow(judge):
    """A loss that stops at 4.0 while FP32 goes on: it diverges, from the step where it stops."""
    arm = judge("fp16", plateau=4.0, grad_norm=0.01, loss_scale=1.0, tokens_per_second=2000.0)
    assert arm.verdict.word == "diverges"
    steps = arm.measures["divergence_step"]
    assert set(steps) == {"0", "1", "2"}
    assert all(12 <= step <= 20 for step in steps.values())
    assert arm.measures["grad_norm_ratio"]["mean"] == pytest.approx(0.01)


def test_a_run_that_died_of_its_numerics(judge):
    """One of three seeds ended at step 30 with the outcome numerics: the arm diverges there."""
    arm = judge(num_steps=[60, 30, 60], horizon=60, outcome=["finished", "numerics", "finished"])
    assert arm.verdict.word == "diverges"
    assert "1 of 3 runs: seed 1 from step 31" in arm.verdict.reason


def test_neither_faster_nor_smaller(judge):
    """The same loss at 0.8x: no gain, whatever else."""
    arm = judge(tokens_per_second=800.0)
    assert arm.verdict.word == "no gain"
    assert arm.verdict.quality.word == "equivalent"
    assert arm.verdict.speed.word == "slower"


def test_smaller_at_the_same_speed_is_a_gain(judge):
    """Half the peak of memory counts as much as speed."""
    arm = judge(memory_bytes=350 << 20)
    assert arm.verdict.word == "equivalent"
    assert "smaller (0.50x" in arm.verdict.reason


def test_one_seed_gives_no_verdict(judge):
    """However good it looks."""
    arm = judge(seeds=(0,), tokens_per_second=3000.0)
    assert arm.verdict.word == "not enough seeds"


def test_seeds_that_disagree_give_no_verdict(judge):
    """+0.15, -0.12 and 0: nothing is shown, and it is said how many seeds would show it."""
    arm = judge(above=[0.15, -0.12, 0.0], tokens_per_second=2000.0)
    assert arm.verdict.word == "not enough seeds"
    assert "would" in arm.verdict.reason


def test_another_data_order_is_refused(judge):
    """One of three runs saw other batches: no verdict on any number of it."""
    arm = judge(shifted=[0, 1, 0], tokens_per_second=2000.0)
    assert arm.verdict.word == "not comparable"
    assert "1 thing differs: batches of 60 steps (seed 1)" in arm.verdict.reason
    assert arm.verdict.quality is None


def test_out_of_memory_is_an_outcome(judge):
    """A run that never made a step, with two that did."""
    arm = judge(
        num_steps=[60, 0, 60], horizon=60, outcome=["finished", "out_of_memory", "finished"]
    )
    assert arm.verdict.word == "out of memory"


def test_a_run_that_is_not_done_is_no_verdict(judge):
    """A preempted run makes its arm incomplete, and says which and why."""
    arm = judge(num_steps=[60, 60, 40], horizon=60, outcome=["finished", "finished", "preempted"])
    assert arm.verdict.word == "incomplete"
    assert arm.verdict.reason == "bf16-2: preempted"


def test_fp32_against_itself_is_exactly_zero(tmp_path):
    """A second arm in FP32, run again: every gap is 0, and there is no gain."""
    paths = make_arm(tmp_path, "fp32")
    again = make_arm(tmp_path / "again", "fp32")
    runs = [read_record(path) for path in paths] + [read_record(p, arm="again") for p in again]
    arm = judge_runs(runs)[1]
    assert arm.measures["loss_difference"] == {
        "mean": 0.0, "spread": 0.0, "by_seed": {"0": 0.0, "1": 0.0, "2": 0.0},
    }  # fmt: skip
    assert arm.measures["largest_gap"]["value"] == 0.0
    assert arm.verdict.word == "no gain"


def test_scale_and_skips_are_told(judge):
    """A dynamic scale that fell twice."""
    arm = judge("fp16", loss_scale=65536.0, skipped=(2, 3), tokens_per_second=2000.0)
    assert arm.measures["skipped_steps"] == 6
    assert arm.measures["loss_scale"] == {
        "first": 65536.0, "last": 16384.0, "lowest": 16384.0, "highest": 65536.0,
    }  # fmt: skip


def test_without_fp32_nothing_is_judged(tmp_path):
    """There is nothing to compare with."""
    assert judge_runs([read_record(path) for path in make_arm(tmp_path, "bf16")]) == []


def test_a_loss_that_is_not_finite_is_where_it_diverges(tmp_path):
    """From the step itself, however the run went on."""
    good = read_record(make_run(tmp_path / "good"))
    path = make_run(tmp_path / "bad", mode="fp16")
    journal = path / "journal" / "attempt-0000.jsonl"
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    rows[29]["loss"] = "nan"
    journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert divergence_step(good, read_record(path)) == 30
    assert divergence_step(good, good) is None


def test_a_held_out_loss_that_is_not_finite_diverges(judge, tmp_path):
    """Also where the training loss stays finite."""
    arm = judge()
    for path in (tmp_path / "arm").iterdir():
        metrics = path / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        for line in lines:
            if line["step"] == 30 and "eval/loss" in line:
                line["eval/loss"] = "inf"
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = [read_record(path) for path in [*tmp_path.glob("fp32-*"), *(tmp_path / "arm").iterdir()]]
    found = judge_runs(runs)[1]
    assert (arm.verdict.word, found.verdict.word) == ("no gain", "diverges")
    assert "from step 30" in found.verdict.reason


def test_an_fp32_that_diverges_is_no_reference(tmp_path):
    """The other arm is not blamed for it: nothing is judged, and the step is named."""
    paths = make_arm(tmp_path, "fp32") + make_arm(tmp_path, "bf16")
    journal = paths[1] / "journal" / "attempt-0000.jsonl"
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    rows[39] = {**rows[39], "loss": "nan"}
    journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fp32, bf16 = judge_runs([read_record(path) for path in paths])
    assert (fp32.verdict.word, bf16.verdict.word) == ("incomplete", "incomplete")
    assert fp32.verdict.reason == "FP32 itself diverges: fp32, seed 1 from step 40"
    assert bf16.verdict.reason == fp32.verdict.reason
    assert bf16.measures["divergence_step"] == {"0": None, "1": None, "2": None}


def test_a_gap_that_closes_again_is_no_divergence(tmp_path):
    """Early losses 50 % above FP32's, the last ones equal."""
    good = read_record(make_run(tmp_path / "good"))
    path = make_run(tmp_path / "late", mode="bf16")
    journal = path / "journal" / "attempt-0000.jsonl"
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    for row in rows[10:30]:
        row["loss"] *= 1.5
    journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert divergence_step(good, read_record(path)) is None


def test_utilization_is_measured_where_the_device_is_known(judge):
    """On a processor there is none, for any seed."""
    found = judge(tokens_per_second=2000.0).measures["model_flops_utilization"]
    assert found == {"mean": None, "spread": None, "by_seed": {"0": None, "1": None, "2": None}}


def test_the_mean_height_is_of_the_whole_curve(judge):
    """A curve that comes to be 0.1 nats above is half of that above on the way."""
    arm = judge(above=0.1, tokens_per_second=2000.0)
    mean = arm.measures["mean_height_difference"]["mean"]
    assert 0.04 < mean < 0.06
    assert math.isclose(arm.measures["final_loss"]["by_seed"]["1"], course(60, 1) + 0.15)
