# SPDX-License-Identifier: Apache-2.0
"""A run folder tells how its run stands, also when nobody could write it down."""

import json
import os
import socket
import time
from datetime import datetime, timezone

import pytest

from mprecipes.errors import ConfigError
from mprecipes.identity.history import now, read_run, status_code


def entry(**facts):
    names = ("ended", "outcome", "exit_code", "error", "step")
    return {"attempt": 0, "started": "2026-11-30T00:00:00+00:00"} | dict.fromkeys(names) | facts


def write_run(folder, *attempts, **facts):
    run = {
        "schema": 1,
        "run_id": "0123456789ab",
        "wandb_id": "0123456789ab",
        "recipe": {"name": "r"},
        "created": "2026-11-30T00:00:00+00:00",
        "horizon": 100,
        "attempts": list(attempts),
    }
    (folder / "run.json").write_text(json.dumps(run | facts))


def write_lease(folder, **facts):
    holder = {"host": "elsewhere", "pid": 1, "heartbeat": time.time(), "attempt": 0, "step": 41}
    (folder / "lease.json").write_text(json.dumps(holder | facts))


@pytest.mark.parametrize(
    ("outcome", "code"), [("finished", 0), ("preempted", 75), ("halted", 4), ("crashed", 1)]
)
def test_status_is_the_last_attempt(tmp_path, outcome, code):
    """Outcome and exit code are those of the last attempt, not of an earlier one."""
    first = entry(outcome="preempted", exit_code=75)
    write_run(tmp_path, first, entry(attempt=1, outcome=outcome, exit_code=code))
    info = read_run(tmp_path)
    assert (info.outcome, status_code(info), info.is_running) == (outcome, code, False)
    assert (info.run_id, info.wandb_id, info.horizon) == ("0123456789ab", "0123456789ab", 100)
    assert info.lease is None


def test_live_lease_means_running(tmp_path):
    """A fresh heartbeat means running, with code 1 because nothing has ended."""
    write_run(tmp_path, entry())
    write_lease(tmp_path)
    info = read_run(tmp_path)
    assert (info.outcome, status_code(info)) == ("running", 1)
    assert info.attempts[0]["outcome"] is None
    assert info.lease["step"] == 41


def test_no_outcome_and_no_live_lease_means_killed(tmp_path):
    """An attempt that vanished is called killed, with the time and step of its last heartbeat."""
    write_run(tmp_path, entry(step=40))
    write_lease(tmp_path, heartbeat=1_700_000_000.0)
    info = read_run(tmp_path)
    assert (info.outcome, status_code(info)) == ("killed", 1)
    assert info.attempts[0]["ended"] == "2023-11-14T22:13:20+00:00"
    assert info.attempts[0]["step"] == 41
    assert info.attempts[0]["error"] == "the process ended without recording how"


def test_lease_of_another_attempt_says_nothing_about_this_one(tmp_path):
    """A dead lease left by an earlier attempt does not date the last one's end."""
    write_run(tmp_path, entry(attempt=0, outcome="crashed", exit_code=1), entry(attempt=1, step=7))
    write_lease(tmp_path, heartbeat=1_700_000_000.0)
    last = read_run(tmp_path).attempts[-1]
    assert (last["outcome"], last["ended"], last["step"]) == ("killed", None, 7)


def test_failure_of_another_rank_explains_the_end(tmp_path):
    """When rank 0 was ended from outside, the failed rank's own record tells why."""
    write_run(tmp_path, entry())
    (tmp_path / "failures").mkdir()
    failure = {"rank": 1, "outcome": "numerics", "exit_code": 5, "error": "rank 1: loss is nan"}
    text = json.dumps(failure | {"ended": "2026-11-30T00:01:00+00:00", "step": 12})
    (tmp_path / "failures" / "attempt-0000-rank-1.json").write_text(text)
    (tmp_path / "failures" / "attempt-0001-rank-1.json").write_text("{}")
    info = read_run(tmp_path)
    assert (info.outcome, status_code(info)) == ("numerics", 5)
    assert info.attempts[0]["error"] == "rank 1: loss is nan"
    assert (info.attempts[0]["failed_rank"], info.attempts[0]["step"]) == (1, 12)


def test_of_several_failures_the_named_one_tells(tmp_path):
    """Rank 1 lost the connection because rank 2 ran out of memory."""
    write_run(tmp_path, entry())
    (tmp_path / "failures").mkdir()
    for rank, outcome in ((1, "crashed"), (2, "out_of_memory"), (3, "crashed")):
        failure = {"rank": rank, "outcome": outcome, "exit_code": 1, "error": f"rank {rank}"}
        text = json.dumps(failure | {"ended": "2026-11-30T00:01:00+00:00", "step": 12})
        (tmp_path / "failures" / f"attempt-0000-rank-{rank}.json").write_text(text)
    (attempt,) = read_run(tmp_path).attempts
    assert (attempt["outcome"], attempt["failed_rank"]) == ("out_of_memory", 2)


def test_reading_writes_nothing(tmp_path):
    """Status leaves every byte of the folder as it was."""
    write_run(tmp_path, entry())
    write_lease(tmp_path, host=socket.gethostname(), pid=os.getpid(), heartbeat=1.0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert read_run(str(tmp_path)).is_running
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_folder_without_run_is_refused(tmp_path):
    """A folder in which nothing ran is refused by name."""
    with pytest.raises(ConfigError) as caught:
        read_run(tmp_path)
    assert caught.value.found == "no run.json"
    assert caught.value.expected == "the output_dir of a run"
    assert caught.value.where == str(tmp_path)
    assert caught.value.action.startswith("check the path")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"schema": 1, "att', "run.json is damaged (JSONDecodeError"),
        ("[]", "run.json is damaged (TypeError"),
        ("{}", "run.json is damaged (KeyError: 'schema')"),
        ('{"schema": 2, "attempts": []}', "run.json has schema 2"),
        ('{"schema": 1, "attempts": []}', "no attempt"),
        ('{"schema": 1}', "run.json is damaged (KeyError: 'attempts')"),
        ('{"schema": 1, "attempts": {}}', "no attempt"),
        ('{"schema": 1, "attempts": 7}', "run.json lacks run_id, wandb_id, recipe, created, horiz"),
    ],
)
def test_damaged_run_file_is_refused(tmp_path, text, found):
    """A run.json that is torn or of another kind is refused, never overwritten."""
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_run(tmp_path)
    assert caught.value.found.startswith(found)
    assert caught.value.expected == "the run.json, schema 1, that a run wrote"
    assert caught.value.where == str(tmp_path / "run.json")
    assert caught.value.action == "put back a copy of it, or use a new --output_dir"


@pytest.mark.parametrize(
    ("attempts", "facts", "found"),
    [
        ([], {}, "no attempt"),
        ([entry()], {"run_id": None}, "run.json lacks run_id"),
        ([entry()], {"horizon": "100", "recipe": "r"}, "run.json lacks recipe, horizon"),
        ([7], {}, "run.json lacks attempt 0 with its number and outcome"),
        ([entry(), {"attempt": 1}], {}, "run.json lacks attempt 1 with its number and outcome"),
        ([entry(outcome="crashed")], {}, "run.json lacks the exit code of attempt 0"),
    ],
)
def test_incomplete_run_file_is_refused(tmp_path, attempts, facts, found):
    """What is missing in run.json is named, before anything relies on it."""
    write_run(tmp_path, *attempts, **facts)
    with pytest.raises(ConfigError) as caught:
        read_run(tmp_path)
    assert caught.value.found == found
    assert caught.value.expected == "the run.json, schema 1, that a run wrote"
    assert caught.value.where == str(tmp_path / "run.json")


@pytest.mark.parametrize("text", ['{"rank": 1, "outc', "[]", "{}", '{"rank": null}'])
def test_a_failure_that_cannot_be_read_is_passed_over(tmp_path, text, caplog):
    """A torn record of one rank hides neither the run nor the record of another rank."""
    write_run(tmp_path, entry())
    (tmp_path / "failures").mkdir()
    (tmp_path / "failures" / "attempt-0000-rank-1.json").write_text(text)
    assert read_run(tmp_path).outcome == "killed"
    assert "failures/attempt-0000-rank-1.json is not counted" in caplog.text
    failure = {"rank": 2, "outcome": "numerics", "exit_code": 5, "error": "rank 2: loss is nan"}
    text = json.dumps(failure | {"ended": None, "step": 12})
    (tmp_path / "failures" / "attempt-0000-rank-2.json").write_text(text)
    (attempt,) = read_run(tmp_path).attempts
    assert (attempt["outcome"], attempt["failed_rank"], attempt["step"]) == ("numerics", 2, 12)


def test_time_is_utc():
    """Time stamps are ISO 8601 in UTC."""
    assert now().endswith("+00:00")
    age = datetime.now(timezone.utc) - datetime.fromisoformat(now())
    assert -1 < age.total_seconds() < 60
