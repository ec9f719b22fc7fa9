# SPDX-License-Identifier: Apache-2.0
"""The gate from outside: killed on probation, halted, accepted, taken back to an earlier step."""

import json
import shutil

import pytest

from tests.fix64 import RECIPE, options, write_rows
from tests.launching import launch, run_command
from tests.reading import (
    assert_released,
    assert_same_run,
    attempt_lines,
    checkpoint_steps,
    manifest,
    outcomes,
    resume_report,
    run_json,
)
from tests.recipe_server import run_recipe
from tests.wandb_reading import history, records, segments

SETTINGS = {"save_steps": 3, "max_steps": 14, "precision": "fp32", "keep_last": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that was never interrupted, `whole`, and one killed at step 8, `killed`."""
    folder = tmp_path_factory.mktemp("gate")
    data = write_rows(folder / "rows.jsonl")
    for name, env in (("whole", {}), ("killed", {"MPRECIPES_FAULT": "kill@step:8"})):
        run_recipe(options(data, folder / name, **SETTINGS), env=env)
    assert checkpoint_steps(folder / "whole") == [3, 6, 9, 12, 14]
    assert checkpoint_steps(folder / "killed") == [3, 6]
    return folder


@pytest.fixture
def go(folder, tmp_path):
    """Copies the killed run and launches it again and again."""
    run = tmp_path / "run"
    shutil.copytree(folder / "killed", run)

    def again(*flags, **settings):
        words = options(folder / "rows.jsonl", run, **SETTINGS)
        return run_recipe([*words, *flags], **settings)

    return run, again


def killed_on_probation(run, again):
    """Attempt 1 goes on from step 6, saves step 9 and is killed at step 10 of 11."""
    ended = again(env={"MPRECIPES_FAULT": "kill@step:10"})
    assert ended.codes == [-9]
    assert resume_report(run, 1)["verdict"] == "on_probation"
    assert manifest(run, 9)["provisional"] == {"attempt": 1, "base": 6}
    assert checkpoint_steps(run) == [3, 6, 9]


@pytest.mark.faults
def test_killed_on_probation_it_goes_on_from_what_was_saved(folder, go):
    """Step 9 is provisional; the next launch uses it, is released, and equals the whole run."""
    run, again = go
    killed_on_probation(run, again)
    ended = again()
    assert ended.codes == [0], ended.output
    report = resume_report(run, 2)
    assert (report["step"], report["base"]) == (9, 6)
    assert_released(report)
    assert manifest(run, 12)["provisional"] == {"attempt": 2, "base": 6}
    assert manifest(run, 14)["provisional"] is None
    assert_same_run(run, folder / "whole")


@pytest.mark.faults
def test_after_a_halt_what_was_saved_on_probation_is_set_aside(folder, go):
    """Attempt 2 goes on from provisional step 9 and halts: attempt 3 starts at step 6 again."""
    run, again = go
    killed_on_probation(run, again)
    assert again(plant="dropout_off").codes == [4]
    assert checkpoint_steps(run) == [3, 6, 9]
    ended = again()
    assert ended.codes == [0], ended.output
    assert resume_report(run, 3)["step"] == 6
    reason = json.loads((run / "set_aside" / "step-00000009.reason.json").read_text())
    assert reason["reason"] == "saved on probation by attempt 1; attempt 2 is halted"
    assert_same_run(run, folder / "whole")


@pytest.mark.faults
def test_another_environment_passes_when_its_drift_is_small(go):
    """Another torch that computes the same: no flag is needed, and what was measured is printed."""
    run, again = go
    ended = again(plant="other_torch")
    assert ended.codes == [0], ended.output
    report = resume_report(run, 1)
    assert_released(report)
    (row,) = (check for check in report["checks"] if check["name"] == "communication")
    found = row["found"]["environment"]
    assert found["changes"][0].startswith("environment.torch: ")
    assert found["drift"] == {"probe_loss_difference": 0.0, "probe_cosine": 1.0}
    assert "profile of the precision mode" in row["tolerance"]["environment"]
    assert "changed: environment.torch: " in ended.output


@pytest.mark.faults
def test_a_probe_of_one_process_is_repeated_by_two(folder, go):
    """1 -> 2 processes with half the accumulation: the same batch, the same loss within profile."""
    run, again = go
    words = ["--per_device_train_batch_size", "2", "--accept", "changed_micro_batch"]
    ended = again(*words, world_size=2)
    assert ended.codes == [0, 0], ended.output
    report = resume_report(run, 1)
    assert report["verdict"].startswith("released")  # other dropout, and a warning that says so
    assert report["replayed_steps"] == 2


PLANT = """
from tests.resume import plants

plants.{name}(__import__("sys").modules[__name__])
if __name__ == "__main__":
"""


@pytest.mark.launch
def test_halt_accept_and_an_earlier_step_through_the_launcher(folder, tmp_path):
    """Exit codes 4, 4 and 0: halted in another environment, taken back, accepted."""
    run, recipe = tmp_path / "run", tmp_path / "planted.py"
    shutil.copytree(folder / "killed", run)
    source, main = RECIPE.read_text(), 'if __name__ == "__main__":\n'
    recipe.write_text(source.replace(main, PLANT.format(name="other_torch_with_drift")))
    watch = json.dumps({"report_to": ["wandb"]})
    words = options(folder / "rows.jsonl", run, watch=watch, **SETTINGS)

    done = launch(recipe, words)
    assert done.returncode != 0
    assert run_json(run)["attempts"][-1]["exit_code"] == 4, done.output
    assert run_command(["mprecipes", "status", run]).returncode == 4
    assert "communication: environment is" in done.output
    assert "--resume_from 3   the checkpoint before this one" in done.output
    assert "--accept changed_environment   the change is meant" in done.output
    shown = run_command(["mprecipes", "verify", run, "--resume_report", "1"])
    assert shown.returncode == 1
    assert "halted: nothing was deleted" in shown.output

    done = launch(recipe, [*words, "--resume_from", "3", "--accept", "changed_environment"])
    assert done.returncode == 0, done.output
    report = resume_report(run, 2)
    assert (report["step"], report["verdict"]) == (3, "released_with_warnings")
    assert [line["step"] for line in attempt_lines(run, 2)] == list(range(4, 15))
    assert (run / "set_aside" / "step-00000006").is_dir()
    assert outcomes(run) == ["killed", "halted", "finished"]
    assert run_command(["mprecipes", "status", run]).returncode == 0
    assert run_command(["mprecipes", "verify", run, "--resume_report", "2"]).returncode == 0

    halted, finished = segments(run)
    for segment, released in ((halted, 0.0), (finished, 1.0)):
        (row,) = (row for row in history(segment) if "resume/released" in row)
        assert row["resume/released"] == released
        (table,) = (row for row in history(segment) if "resume/checks.nrows" in row)
        assert table["resume/checks.nrows"] == 8
        artifacts = [json.dumps(record) for record in records(segment, "artifact")]
        assert any(f"resume-{run_json(run)['run_id']}" in text for text in artifacts)
    steps = [row["train/step"] for row in history(finished)]
    assert steps == sorted(steps)
