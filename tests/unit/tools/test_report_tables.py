# SPDX-License-Identifier: Apache-2.0
"""The cells of the tables show the numbers they hold."""

import json

import pytest

from mprecipes.tools import report_tables as tables
from mprecipes.tools.compare_measures import judge_runs
from mprecipes.tools.run_records import read_record
from tests.made_runs import make_arm, make_run


@pytest.fixture
def runs(tmp_path):
    paths = make_arm(tmp_path, "fp32")
    paths += make_arm(tmp_path, "bf16", tokens_per_second=1500.0, shifted=[0, 0, 4])
    return [read_record(path) for path in paths]


def column(table, name):
    return [row[table.columns.index(name)] for row in table.rows]


def test_numbers_and_what_is_none():
    """Text as shown, value in full; a dash for nothing; a name for what is not finite."""
    assert tables.number(2.50123456, ".2f", " s").text == "2.50 s"
    assert tables.number(2.50123456, ".2f", " s").value == 2.50123456
    assert (tables.number(None).text, tables.number(None).value) == ("-", None)
    assert (tables.number(float("nan")).text, tables.number(float("nan")).value) == ("nan", None)


def test_verdicts_and_costs(runs):
    """One row an arm, with its word, and the ratio to FP32 where it is judged."""
    arms = judge_runs(runs)
    table = tables.verdict_table(arms, 0.01)
    assert [cell.text for cell in column(table, "verdict")] == ["reference", "not comparable"]
    assert "Margin of equivalence: 0.0100 nats" in table.note
    costs = tables.cost_table(arms)
    rates = [cell.value for cell in column(costs, "tokens/s end to end")]
    assert rates == [pytest.approx(1000.0), pytest.approx(1500.0)]
    assert "MFU, at least" not in costs.columns


def test_conditions_show_digests_and_the_one_that_differs(runs):
    """Three seeds of nine rows; seed 2 saw other batches, and both digests are shown."""
    table = tables.conditions_table(judge_runs(runs))
    assert table.columns == ("must be equal", "seed", "FP32", "bf16")
    assert len(table.rows) == 27
    different = [[cell.text for cell in row] for row in table.rows if row[3].text != "equal"]
    assert [row[:2] for row in different] == [["batches of 60 steps", "2"]]
    assert len(different[0][2]) == len(different[0][3]) == 16


def test_runs_name_their_folders_without_the_machine(runs):
    """The last two parts of a path."""
    table = tables.runs_table(runs)
    assert column(table, "folder")[0].text.endswith("/fp32-0")
    assert column(table, "steps")[0].text == "60 of 60"


def test_settings_have_one_column_an_arm(runs):
    """What differs between the seeds of every arm alike, such as the seed, is left out."""
    table = tables.settings_table(runs)
    assert table.columns == ("setting", "fp32", "bf16")
    texts = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert texts == {"precision": ["fp32", "bf16"]}
    assert tables.settings_table(runs[:1]) is None


def test_resumes_show_their_proofs(tmp_path):
    """Verdict, replayed steps and each check of the resume report."""
    run = make_run(tmp_path / "run")
    (run / "resume").mkdir()
    report = {
        "attempt": 1, "verdict": "released", "checkpoint": "checkpoints/step-00000020", "step": 20,
        "replayed_steps": 3, "checks": [{"name": "bytes", "verdict": "passed"}],
    }  # fmt: skip
    (run / "resume" / "attempt-0001.json").write_text(json.dumps(report))
    (row,) = tables.resumes_table([read_record(run)]).rows
    assert [cell.text for cell in row] == [
        "fp32, seed 0", "1", "checkpoints/step-00000020", "released", "3", "bytes passed",
    ]  # fmt: skip


def test_the_environment_is_told_once_unless_it_differs(runs):
    """One value for all runs."""
    table = tables.environment_table(runs)
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["python", "3.11.2"], ["torch", "2.13.0"], ["cpu_model", "A Processor"],
    ]  # fmt: skip
