# SPDX-License-Identifier: Apache-2.0
"""A drill's launches are made alike, and each is refused when it did not end as it should have."""

import json
import sys

import pytest

from mprecipes.errors import ConfigError, RecipeError
from mprecipes.tools.drill_launches import Launches, accelerate_launcher, steps_of
from mprecipes.tools.drill_report import Watch

DIE = "import os; os.kill(os.getpid(), 9)"


def launches(folder, script: str) -> Launches:
    folder.mkdir(exist_ok=True)
    return Launches([sys.executable, "-c", script], folder, 60.0, Watch(None))


def write_attempt(run, **facts) -> None:
    entry = {"attempt": 0, "outcome": None, "exit_code": None, "error": None, "step": None, **facts}
    told = {"schema": 1, "run_id": "0", "wandb_id": "0", "recipe": {}, "created": "", "horizon": 12}
    (run / "run.json").write_text(json.dumps({**told, "attempts": [entry]}))


def test_launcher_command(tmp_path):
    """Processes and config go to the elastic launcher, on a port that is free."""
    config = tmp_path / "mine.yaml"
    config.write_text("")
    assert accelerate_launcher(config, 2)[1:] == [
        "-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "2",
        "--main_process_port", "0",
    ]  # fmt: skip


def test_launcher_config_that_is_not_there(tmp_path):
    """A config that does not exist is refused: found, expected, where, action."""
    with pytest.raises(ConfigError) as caught:
        accelerate_launcher(tmp_path / "no.yaml", 1)
    assert caught.value.found == "no such file"
    assert "elastic launcher" in caught.value.expected
    assert caught.value.where == f"--accelerate_config {tmp_path / 'no.yaml'}"
    assert "accelerate_configs/" in caught.value.action


def test_output_dir_comes_last(tmp_path):
    """The run folder is the drill's, whatever output_dir the recipe was given before."""
    drill = launches(tmp_path / "d", "import sys; print(sys.argv[1:])")
    drill.command += ["--output_dir", "elsewhere"]
    assert drill.launch("reference", tmp_path / "d" / "reference") == 0
    assert drill.tail("reference") == str(
        ["--output_dir", "elsewhere", "--output_dir", str(tmp_path / "d" / "reference")]
    )
    assert list(drill.seconds) == ["reference"]


def test_reference_that_keeps_nothing(tmp_path):
    """A recipe that ends well and keeps no journal cannot be drilled, and its output is shown."""
    with pytest.raises(ConfigError) as caught:
        launches(tmp_path, "print('all done')").reference()
    assert caught.value.found == "exit code 0, 0 journaled steps, newest checkpoint None"
    assert "a journal and a checkpoint" in caught.value.expected
    assert caught.value.where.startswith("the uninterrupted run")
    assert caught.value.action.endswith("all done")


def test_reference_gives_its_last_step(tmp_path, folders):
    """A reference run with journal and checkpoint gives the step it ended at."""
    folders.run(tmp_path / "reference", [(1, 12)], [12])
    assert launches(tmp_path, "").reference() == 12


@pytest.mark.parametrize(
    ("script", "last", "entry", "accepted"),
    [
        (DIE, 7, {}, True),
        (DIE, 6, {}, False),
        (DIE, 7, {"outcome": "numerics", "exit_code": 5}, False),
        ("pass", 7, {}, False),
    ],
)
def test_kill_counts_only_as_asked(tmp_path, folders, script, last, entry, accepted):
    """A kill is one only with a failing code, the very step, and an attempt that never said why."""
    run = folders.run(tmp_path / "made", [(1, last)], [])
    write_attempt(run, **entry)
    script = f"import os, sys; os.rename({str(run)!r}, sys.argv[2])\n{script}"
    drill = launches(tmp_path, script)
    if accepted:
        assert drill.killed(1, 7, "step") == 0
        return
    with pytest.raises(ConfigError) as caught:
        drill.killed(1, 7, "step")
    assert f"last journaled step {last}" in caught.value.found
    assert caught.value.expected == "a run cut off by SIGKILL: not 0, step 7, outcome killed"
    assert caught.value.where == "--kill_at_step 7, fault point 'step'"
    assert "fault_point('step', step)" in caught.value.action


def test_kill_of_a_run_that_never_started(tmp_path):
    """A launch that dies before it opens its run folder is no kill."""
    with pytest.raises(ConfigError) as caught:
        launches(tmp_path, DIE).killed(1, 7, "step")
    assert caught.value.found == (
        "exit code -9, last journaled step None, outcome none: nothing started"
    )


def test_resume_that_fails(tmp_path):
    """A resumed run that ends with an error is what a drill finds: exit 1, its output shown."""
    with pytest.raises(RecipeError) as caught:
        launches(tmp_path, "raise SystemExit('halted')").resumed()
    assert caught.value.found == "the resumed run ended with exit code 1"
    assert "continue the killed run" in caught.value.expected
    assert str(tmp_path / "interrupted") in caught.value.where
    assert caught.value.action.endswith("halted")
    assert caught.value.exit_code == 1


def test_steps_of_an_attempt(tmp_path, folders):
    """Steps are those of one attempt; an attempt that journaled nothing has none."""
    run = folders.run(tmp_path / "run", [(1, 7), (5, 12)], [])
    assert steps_of(run, 1) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert steps_of(run, 2) == []
    assert steps_of(tmp_path / "absent", 0) == []
