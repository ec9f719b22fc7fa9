# SPDX-License-Identifier: Apache-2.0
"""The real W&B client without a login: a run that is killed, resumed, replayed and halted."""

import math
import re

import pytest

from tests.observe.conftest import num_bytes
from tests.tracked_process import values
from tests.wandb_reading import config, history, records, segments

pytestmark = pytest.mark.launch
WEIGHTS_BYTES = 1_000_000  # few enough for a report


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tmp_path_factory.mktemp("offline") / "run"


@pytest.fixture(scope="module")
def output(run, tracked):
    """Attempt 0 logs steps 1 to 7 and is killed; attempt 1 goes on from 4 and is halted at 10."""
    with tracked(run, 0) as first:
        first.tell("log 1 7")
        # Each row is in the file as history and as summary.
        first.wait_until(
            lambda: sum(s.read_bytes().count(b"train/loss") for s in segments(run)) >= 14
        )
        first.kill()
    weights, report = run / "model.safetensors", run / "attempt-0001.json"
    weights.write_bytes(bytes(WEIGHTS_BYTES))
    report.write_text('{"verdict": "halted"}')
    with tracked(run, 1) as second:
        return second.end("log 5 10", f"weights {weights}", f"report {report}", "checks", "halt")


def test_a_process_start_is_one_folder_and_all_are_one_run(run, output):
    """Two starts left two folders, both of the run's id, and nothing in the user's home."""
    assert len(segments(run)) == 2
    assert [records(segment, "run")[0]["run_id"] for segment in segments(run)] == ["0123abcd"] * 2
    assert list((run.parent / "home").iterdir()) == []


def test_every_row_comes_back_value_by_value(run, output):
    """Steps 1 to 7, then 5 to 10 again, each with its attempt, bit for bit, NaN as NaN."""
    for segment, attempt, steps in zip(segments(run), (0, 1), (range(1, 8), range(5, 11))):
        rows = [row for row in history(segment) if "train/loss" in row]
        assert [row["train/step"] for row in rows] == list(steps)
        assert {row["resume/attempt"] for row in rows} == {attempt}
        for row in rows:
            expected = values(row["train/step"])
            assert row["train/loss"] == expected["train/loss"]
            same = row["train/grad_norm"] == expected["train/grad_norm"]
            assert same or (row["train/step"] == 3 and math.isnan(row["train/grad_norm"]))
    assert "lost 0" in output


def test_repeated_steps_never_go_back_on_the_clients_own_step(run, output):
    """The client's step counts rows from 0; the x axis of every metric is train/step."""
    for segment in segments(run):
        rows = history(segment)
        assert [row["_step"] for row in rows] == list(range(len(rows)))
        (metric,) = records(segment, "metric")
        assert (metric["glob_name"], metric["step_metric"]) == ("*", "train/step")


def test_the_config_is_flat_and_in_every_segment(run, output):
    """A nested value has a dotted name, a list is text; runs group by `precision`."""
    for segment in segments(run):
        assert config(segment) == {
            "recipe": "made_up",
            "precision": "bf16",
            "nested.rate": 0.5,
            "betas": "[0.9, 0.95]",
        }


def test_weights_are_pointed_at_and_never_copied(run, output):
    """The artifact holds a file:// URI; everything of W&B together is smaller than the weights."""
    artifacts = {a["type"]: a for a in records(segments(run)[1], "artifact")}
    (entry,) = artifacts["checkpoint"]["manifest"]["contents"]
    assert entry["ref"] == (run / "model.safetensors").as_uri()
    assert "local_path" not in entry
    assert num_bytes(run / "wandb") < WEIGHTS_BYTES


def test_a_report_is_a_small_artifact_and_the_checks_a_table(run, output):
    """The report is taken from where it lies; the table stands under its metric's name."""
    artifacts = {a["type"]: a for a in records(segments(run)[1], "artifact")}
    (entry,) = artifacts["resume"]["manifest"]["contents"]
    assert entry["local_path"] == str(run / "attempt-0001.json")
    (table,) = [row for row in history(segments(run)[1]) if "resume/checks.path" in row]
    assert (table["resume/checks.nrows"], table["train/step"]) == (2, 10)


def test_a_halt_is_an_alert_and_the_exit_code(run, output):
    """The alert says what was found; W&B has the halt's exit code 4 and none of the killed one."""
    (alert,) = records(segments(run)[1], "alert")
    assert (alert["title"], alert["level"]) == ("halted: run", "ERROR")
    assert "the losses differ" in alert["text"]
    assert [r["exit_code"] for r in records(segments(run)[1], "exit")] == [4]
    assert records(segments(run)[0], "exit") == []
    assert "ended by halted" in output


def test_the_console_says_why_it_is_offline_and_how_to_sync(run, output):
    """Without a login: the reason, and a command with the folder of this process."""
    found = re.search(r"W&B: offline \((.*)\); to upload: wandb sync (\S+)", output)
    assert found is not None
    assert found[1] == "no login: no WANDB_API_KEY, and no entry in a netrc file"
    assert found[2] == str(segments(run)[1].parent)


def test_disabled_means_nothing_on_disk(tmp_path, tracked):
    """WANDB_MODE=disabled logs nowhere and loses nothing."""
    run = tmp_path / "run"
    with tracked(run, WANDB_MODE="disabled") as process:
        assert "lost 0" in process.end("log 1 3", "preempt")
    assert segments(run) == []
