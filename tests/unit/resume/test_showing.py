# SPDX-License-Identifier: Apache-2.0
"""What is told of a verdict."""

import io
import sys

from mprecipes.resume.checks import Check, Report
from mprecipes.resume.showing import announcer, render, summary, ways_on


def check(name="weights", verdict="passed", **changes):
    values = {
        "policy": "halt", "expected": {"digest": "aa"}, "found": {"digest": "aa"},
        "tolerance": {"digest": "exact"}, "seconds": 0.25, "meaning": "all is well",
    }  # fmt: skip
    return Check(name, verdict, **{**values, **changes})


class Tracker:
    def __init__(self):
        self.calls = []

    def log(self, step, values):
        self.calls.append(("log", step, dict(values)))

    def table(self, step, name, columns, rows):
        self.calls.append(("table", step, name, list(columns), rows))

    def report(self, name, kind, file):
        self.calls.append(("report", name, kind, file.name))


def test_the_console_gets_a_table_and_the_tracker_numbers_table_and_report(tmp_path, capsys):
    """One row a check on both; the report as an artifact."""
    tracker, path = Tracker(), tmp_path / "attempt-0001.json"
    report = Report(path, {"attempt": 1, "checkpoint": "checkpoints/x", "step": 5}, [check()])
    announcer("abc", tracker)(report, "released", {"resume/released": 1.0})
    out = capsys.readouterr().out
    assert "resume of attempt 1 from checkpoints/x: released: the run continues" in out
    assert "weights" in out and "passed" in out
    assert tracker.calls == [
        ("log", 5, {"resume/released": 1.0}),
        (
            "table", 5, "resume/checks",
            ["check", "verdict", "policy", "expected", "found", "tolerance", "seconds", "meaning"],
            [["weights", "passed", "halt", '{"digest": "aa"}', '{"digest": "aa"}',
              '{"digest": "exact"}', "0.25", "all is well"]],
        ),
        ("report", "resume-abc", "resume-report", "attempt-0001.json"),
    ]  # fmt: skip


def test_other_ranks_tell_nothing(capsys):
    """They have no path."""
    tracker = Tracker()
    announcer("abc", tracker)(Report(None, {}, []), "released", {})
    assert (capsys.readouterr().out, tracker.calls) == ("", [])


def test_a_failed_check_says_what_it_found_and_means():
    """A passed one names its facts; one that had nothing to compare says so."""
    failed = check(verdict="failed", found={"digest": "bb"}, meaning="usually: memory")
    assert summary(failed) == "digest bb; usually: memory"
    assert summary(check()) == "digest"
    read = {"files": 3, "bytes_per_second": 10240243, "quarantined": [], "load_seconds": 0.038}
    text = "files 3, bytes per second 10,240,243, load seconds 0.038"
    assert summary(check(expected="", found=read)) == text
    assert summary(check(verdict="not_judged", expected={})) == "nothing to compare with"
    assert "usually: memory" in render({"verdict": "halted", "attempt": 2}, [failed])


def test_a_console_of_ascii_gets_a_table_of_ascii(monkeypatch):
    """A resumed run ended in UnicodeEncodeError when it drew its verdict."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert render({"verdict": "released", "attempt": 1}, [check()]).isascii()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert not render({"verdict": "released", "attempt": 1}, [check()]).isascii()


def test_a_halt_names_the_commands_to_try():
    """The checkpoint before, accepting the environment, a closer look, a drill."""
    text = ways_on(3, (5, 10), environment=True)
    assert "--resume_from 10 " in text
    assert "--accept changed_environment" in text
    assert "mprecipes verify RUN --resume_report 3" in text
    assert "mprecipes drill RECIPE" in text
    assert "--resume_from" not in ways_on(3, (), environment=False)
