# SPDX-License-Identifier: Apache-2.0
"""The real W&B client against a loopback server that answers, refuses, hangs, or dies."""

import pytest

from tests.tracked_process import values
from tests.wandb_reading import history, segments
from tests.wandb_stub import WandbStub

pytestmark = pytest.mark.launch
RUN_ID = "0123abcd"
QUICK = {"WANDB_INIT_TIMEOUT": "1", "WANDB_FINISH_TIMEOUT": "1"}
PATIENT = {"WANDB_INIT_TIMEOUT": "60", "WANDB_FINISH_TIMEOUT": "60"}


@pytest.fixture(scope="module")
def cut(tmp_path_factory, tracked):
    """Of one run the process is killed after step 7, of another the server dies after step 3.

    At the same time, because the client sends its first rows after 15 seconds.
    """
    one, two = (tmp_path_factory.mktemp(name) / "run" for name in ("killed", "deserted"))
    stub, dying = WandbStub(), WandbStub()
    with stub, dying, tracked(one, **stub.env, **PATIENT) as killed:
        with tracked(two, **dying.env, **{**PATIENT, "WANDB_FINISH_TIMEOUT": "1"}) as deserted:
            killed.tell("log 1 7")
            deserted.tell("log 1 3")
            deserted.wait_until(lambda: len(dying.history(RUN_ID)) == 3)
            dying.die()
            output = deserted.end("log 4 6", "end")
        killed.wait_until(lambda: len(stub.history(RUN_ID)) == 7)
        killed.kill()
        yield one, stub, two, output


@pytest.fixture(scope="module")
def served(cut, tracked):
    """The killed run goes on from step 4 to 10, with all that can be logged, and is preempted."""
    run, stub, _, _ = cut
    weights, report = run / "model.safetensors", run / "attempt-0001.json"
    weights.write_bytes(bytes(1000))
    report.write_text('{"verdict": "released"}')
    with tracked(run, 1, close_seconds=60, **stub.env, **PATIENT) as process:
        orders = ("log 5 10", f"weights {weights}", f"report {report}", "checks", "preempt")
        return run, stub, process.end(*orders)


def test_the_server_holds_every_row_in_the_order_it_was_made(served):
    """Replayed steps 5 to 7 follow the first pass, neither dropped nor out of order."""
    _, stub, output = served
    rows = [row for row in stub.history(RUN_ID) if "train/loss" in row]
    passes = [(row["resume/attempt"], row["train/step"]) for row in rows]
    assert passes == [(0, s) for s in range(1, 8)] + [(1, s) for s in range(5, 11)]
    assert all(row["train/loss"] == values(row["train/step"])["train/loss"] for row in rows)
    assert "lost 0" in output


def test_one_run_goes_on_under_its_id(served):
    """Both processes are one run; its own step goes on from row to row; the config is there."""
    _, stub, output = served
    assert list(stub.runs) == [RUN_ID]
    assert [row["_step"] for row in stub.history(RUN_ID)] == list(range(14))  # a row is the table
    config = stub.config(RUN_ID)
    assert (config["precision"], config["nested.rate"]) == ("bf16", 0.5)
    assert f"{stub.url}/stub-team/mprecipes/runs/{RUN_ID}" in output


def test_artifacts_go_by_reference_and_reports_as_files(served):
    """Of the weights the server gets a URI and not a byte; of the report its text."""
    run, stub, _ = served
    by_type = {facts["type"]: number for number, facts in stub.artifacts.items()}
    assert all(facts["committed"] for facts in stub.artifacts.values())
    entry = stub.manifest(by_type["checkpoint"])["model.safetensors"]
    assert entry["ref"] == (run / "model.safetensors").as_uri()
    uploaded = stub.uploads[f"artifacts/{by_type['resume']}/attempt-0001.json"]
    assert uploaded == b'{"verdict": "released"}'
    assert not any("safetensors" in path for path in stub.uploads)


def test_a_preemption_is_an_alert_and_exit_code_75(served):
    """The server was told of both, and of no call that the stub does not know."""
    _, stub, output = served
    (alert,) = stub.alerts
    assert (alert["title"], alert["severity"]) == ("preempted: run", "WARN")
    assert stub.ended[RUN_ID] == 75
    assert "ended by preempted" in output
    assert stub.unknown == []


@pytest.mark.parametrize("mood", ["hang", "refuse"])
def test_a_server_that_never_answers_well_costs_no_row(tmp_path, tracked, mood):
    """The run goes on offline with every row of it, says why, and ends with exit code 0."""
    run = tmp_path / "run"
    with WandbStub() as stub:
        stub.mood = mood
        with tracked(run, **stub.env, **QUICK) as process:
            output = process.end("log 1 5", "end")
        assert stub.history(RUN_ID) == []
    assert [row["train/step"] for row in history(segments(run)[0])] == [1, 2, 3, 4, 5]
    assert "W&B: offline (not reached: " in output
    assert "lost 0" in output


def test_a_server_that_dies_in_the_middle_costs_no_row(cut):
    """Of steps 1 to 6 the server saw 3; the file has all, and the console says how to sync it."""
    _, _, run, output = cut
    (segment,) = segments(run)
    assert [row["train/step"] for row in history(segment)] == [1, 2, 3, 4, 5, 6]
    assert f"wandb sync {segment.parent}" in output
    assert "lost 0" in output


def test_a_client_that_hangs_is_left_behind(tmp_path, tracked):
    """With the client's helper process stopped, the run ends with exit code 0 all the same."""
    run = tmp_path / "run"
    with tracked(run, close_seconds=0.5) as process:
        process.tell("log 1 3")
        process.wait_until(lambda: any(b"train/loss" in s.read_bytes() for s in segments(run)))
        output = process.end("freeze", "log 4 5", "end")
    assert "tracking: wandb" in output
