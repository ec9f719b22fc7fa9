# SPDX-License-Identifier: Apache-2.0
"""`mprecipes verify RUN --resume_report N`."""

import json

import pytest
from typer.testing import CliRunner

from mprecipes.errors import ConfigError
from mprecipes.tools.cli import app
from mprecipes.tools.resume_report import concluded_well, read_report, report_files

FIVE = ("weights", "optimizer", "data_order", "communication", "throughput")


@pytest.fixture
def run(tmp_path):
    """Attempt 1 was released, attempt 2 halted."""
    (tmp_path / "resume").mkdir()
    for attempt, verdict in ((1, "released"), (2, "halted")):
        checks = [
            {"name": name, "verdict": "passed", "policy": "halt", "expected": {"a": 1},
             "found": {"a": 1}, "tolerance": {"a": "exact"}, "seconds": 0.5, "meaning": "well"}
            for name in FIVE
        ]  # fmt: skip
        report = {
            "verdict": verdict, "attempt": attempt, "checkpoint": "checkpoints/step-00000005",
            "step": 5, "checks": checks, "replayed_steps": 0,
        }  # fmt: skip
        (tmp_path / "resume" / f"attempt-{attempt:04d}.json").write_text(json.dumps(report))
    return tmp_path


def test_a_report_is_shown_and_its_verdict_is_the_exit_code(run):
    """0 for released, 1 for halted; the five checks are in the table."""
    for attempt, code in ((1, 0), (2, 1)):
        done = CliRunner().invoke(app, ["verify", str(run), "--resume_report", str(attempt)])
        assert done.exit_code == code, done.output
        assert all(name in done.output for name in FIVE)
    assert "halted: nothing was deleted" in done.output
    assert concluded_well(read_report(run, 1)[0])


def test_as_json_it_is_the_report_itself(run):
    """One JSON text and nothing else."""
    done = CliRunner().invoke(app, ["verify", str(run), "--resume_report", "1", "--json"])
    assert json.loads(done.output)["verdict"] == "released"


def test_other_files_beside_reports_are_no_reports(run):
    """Neither a note nor another tool's file hides a report."""
    for name in ("notes.json", "attempt-old.json", "attempt-0003.json.bak"):
        (run / "resume" / name).write_text("{}")
    assert report_files(run) == [
        (number, run / "resume" / f"attempt-000{number}.json") for number in (1, 2)
    ]
    assert concluded_well(read_report(run, 1)[0])


def test_an_attempt_without_a_report_is_refused(run):
    """Those that have one are named."""
    with pytest.raises(ConfigError) as error:
        read_report(run, 7)
    assert error.value.found == "no resume report of attempt 7"
    assert error.value.expected == "one of attempts 1, 2"
    assert error.value.where.endswith("attempt-0007.json")
    assert error.value.action.startswith("name an attempt that resumed")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda r: r.pop("verdict"), "verdict"),
        (lambda r: r.update(verdict="fine"), "verdict"),
        (lambda r: r["checks"].pop(0), "check weights"),
        (lambda r: r["checks"][0].pop("policy"), "not a report"),
    ],
)
def test_a_report_that_is_not_whole_is_refused(run, change, found):
    """What is missing is named."""
    path = run / "resume" / "attempt-0001.json"
    report = json.loads(path.read_text())
    change(report)
    path.write_text(json.dumps(report))
    with pytest.raises(ConfigError) as error:
        read_report(run, 1)
    assert found in error.value.found
    assert error.value.expected == "the keys of docs/resume.md and the five checks once each"
    assert error.value.where == str(path)
    assert error.value.action.endswith("restore it")
