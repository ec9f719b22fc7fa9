# SPDX-License-Identifier: Apache-2.0
"""A difference that is not the arm's own is found, by name."""

import pytest

from mprecipes.tools.compare_check import compare_conditions, settings_that_differ
from mprecipes.tools.run_records import read_record
from tests.made_runs import make_run


@pytest.fixture
def fp32(tmp_path):
    return read_record(make_run(tmp_path / "fp32"))


def test_only_the_precision_differs(tmp_path, fp32):
    """An ordinary pair: every row is equal, and the digests are there."""
    run = read_record(make_run(tmp_path / "bf16", mode="bf16", tokens_per_second=2000.0))
    rows = compare_conditions(fp32, run)
    assert [row.what for row in rows if not row.equal] == []
    assert [row.what for row in rows] == [
        "recipe", "seed", "initial weights", "data", "batches of 60 steps",
        "learning rates of 60 updates", "stopping rule", "evaluated steps", "5 other settings",
    ]  # fmt: skip
    assert rows[2].expected == "0000000000000000"


@pytest.mark.parametrize(
    ("planted", "what"),
    [
        ({"shifted": 1}, ["batches of 60 steps"]),
        ({"weights": "ff" * 8}, ["initial weights"]),
        ({"horizon": 90}, ["stopping rule"]),
        ({"seed": 1}, ["seed", "initial weights", "batches of 60 steps"]),
        ({"eval_steps": 20}, ["evaluated steps"]),
        ({"weight_decay": 0.5}, ["weight_decay"]),
        ({"max_grad_norm": 1.0}, ["max_grad_norm"]),
    ],
)
def test_a_planted_difference(tmp_path, fp32, planted, what):
    """Data order, weights, length, seed, evaluation, any option: each is found by its name."""
    run = read_record(make_run(tmp_path / "bf16", mode="bf16", **planted))
    different = [row.what for row in compare_conditions(fp32, run) if not row.equal]
    assert different == what


def test_a_skipped_update_moves_the_rates_and_is_no_difference(tmp_path, fp32):
    """Learning rates belong to updates: a skip at step 3 delays them by a step."""
    run = read_record(make_run(tmp_path / "f", mode="fp16", loss_scale=1024.0, skipped=[3]))
    assert [row.what for row in compare_conditions(fp32, run) if not row.equal] == []


def test_settings_of_the_arm_are_told_apart_from_others(tmp_path, fp32):
    """Numerics are the arm's; where a run is written says nothing."""
    numerics = {"keep_in_fp32": ["norm"]}
    run = read_record(make_run(tmp_path / "b", mode="bf16", numerics=numerics, save_steps=7))
    assert [row.what for row in compare_conditions(fp32, run) if not row.equal] == []
    assert settings_that_differ([fp32, run]) == {
        "precision": ["fp32", "bf16"],
        "numerics": ["none", "{'keep_in_fp32': ['norm']}"],
        "save_steps": ["none", "7"],
    }


def test_a_run_that_recorded_no_weights_is_not_taken_on_trust(tmp_path, fp32):
    """Nothing recorded is a difference, also when both say nothing."""
    import json

    runs = []
    for name in ("a", "b"):
        run = make_run(tmp_path / name)
        facts = json.loads((run / "run.json").read_text())
        del facts["attempts"][0]["initial_weights"]
        (run / "run.json").write_text(json.dumps(facts))
        runs.append(read_record(run))
    row = compare_conditions(*runs)[2]
    assert (row.what, row.expected, row.found) == (
        "initial weights", "not recorded by a", "not recorded by b",
    )  # fmt: skip
    assert not row.equal
