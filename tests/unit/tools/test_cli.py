# SPDX-License-Identifier: Apache-2.0
"""Each command prints what it should, as a table and as JSON, and exits with the right code."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.testing

from mprecipes.errors import ConfigError
from mprecipes.tools import cli

COMMANDS = (
    "list", "env", "status", "verify", "prune", "milestone", "pin", "inspect", "drill", "report",
    "compare", "preview",
)  # fmt: skip


def run(*arguments: object):
    return typer.testing.CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def as_json(*arguments: object):
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture
def a_run(tmp_path, folders):
    """A run that was killed at 7, resumed from 4 and finished, as `run.json` tells it."""
    run = folders.run(tmp_path / "run", [(1, 7), (5, 12)], [4, 8, 12])
    attempts = [
        {"attempt": 0, "started": "2026-11-30T10:00:00+00:00", "ended": None, "outcome": "killed",
         "exit_code": 1, "error": "the process ended without recording how", "step": 4},
        {"attempt": 1, "started": "2026-11-30T10:05:00+00:00", "error": None, "step": 12,
         "ended": "2026-11-30T10:06:00+00:00", "outcome": "finished", "exit_code": 0},
    ]  # fmt: skip
    facts = {"schema": 1, "run_id": "0123456789ab", "wandb_id": "0123456789ab",
             "recipe": {"name": "stand_in", "version": "1.0.0", "status": "own"},
             "created": "2026-11-30T10:00:00+00:00", "horizon": 12,
             "attempts": attempts}  # fmt: skip
    (run / "run.json").write_text(json.dumps(facts))
    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    """Every command's help says how it is called."""
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: mprecipes {command}" in result.stdout
    assert "--json" in result.stdout


def test_help_names_every_command():
    """The help without a command lists all of them."""
    text = run("--help").stdout
    assert [command for command in COMMANDS if command not in text] == []


def test_list():
    """The official recipes are listed with version and file."""
    rows = as_json("list")
    text = run("list").stdout
    assert all(row["name"] in text and row["version"] in text for row in rows)


def test_env():
    """Versions and devices are shown, also as JSON."""
    assert as_json("env")["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "torch" in run("env").stdout


def test_verify(a_run, folders):
    """A whole run verifies with 0, and with 1 once a bit is flipped, the file named."""
    assert run("verify", a_run).exit_code == 0
    report = as_json("verify", a_run)
    assert report["verifies"] is True
    assert [row["step"] for row in report["checkpoints"]] == [12, 8, 4]
    folders.flip(a_run / "checkpoints" / "step-00000008" / "tensors-rank00000-000.safetensors")
    result = run("verify", a_run)
    assert result.exit_code == 1
    assert "step-00000008/tensors-rank00000-000.safetensors: sha256" in result.stdout.replace(
        "\n", ""
    )
    result = run("verify", a_run, "--json")
    assert result.exit_code == 1
    assert [row["verifies"] for row in json.loads(result.stdout)["checkpoints"]] == [
        True,
        False,
        True,
    ]


def test_verify_of_nothing(tmp_path):
    """A run without a checkpoint does not verify."""
    (tmp_path / "run.json").write_text("{}")
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert "no checkpoint to verify" in result.stdout.replace("\n", " ")


def test_inspect(a_run):
    """The summary shows position, recipe, parameters, files and digests; JSON is the manifest."""
    checkpoint = a_run / "checkpoints" / "step-00000012"
    text = run("inspect", checkpoint).stdout
    manifest = as_json("inspect", checkpoint)
    assert manifest["step"] == 12
    for part in ("6,048", "name: stand_in", "mode: fp32", "6 in 1 tensors: 1 float32",
                 "tensors-rank00000-000.safetensors", manifest["root_sha256"],
                 manifest["state_digests"]["weights"]):  # fmt: skip
        assert part in text, part


def test_inspect_refuses_other_folders(a_run):
    """A run folder is no checkpoint; the message says what to name instead."""
    with pytest.raises(ConfigError) as caught:
        typer.testing.CliRunner().invoke(cli.app, ["inspect", str(a_run)], catch_exceptions=False)
    assert caught.value.found == "a folder without a checkpoint"
    assert "manifest.json" in caught.value.expected
    assert caught.value.where == str(a_run)
    assert "checkpoints/" in caught.value.action


def test_status_of_a_finished_run(a_run):
    """A finished run exits 0 and shows attempts, last step and newest checkpoint."""
    result = run("status", a_run)
    assert result.exit_code == 0
    for part in ("0123456789ab", "stand_in@1.0.0", "step-00000012", "finished", "killed"):
        assert part in result.stdout, part
    facts = as_json("status", a_run)
    assert facts["last_step"] == 12
    assert facts["running"] is False
    assert [attempt["last_step"] for attempt in facts["attempts"]] == [7, 12]


def test_status_after_a_refusal(a_run):
    """The run is where it was; the whole refusal is shown once, below the table."""
    facts = json.loads((a_run / "run.json").read_text())
    refused = {
        **facts["attempts"][-1], "attempt": 2, "outcome": "refused", "exit_code": 3, "step": 0,
        "error": "rank 0: ContractRefused: it differs:\n    seed: 1 -> 2\n  next: undo it",
    }  # fmt: skip
    facts["attempts"].append(refused)
    (a_run / "run.json").write_text(json.dumps(facts))
    result = run("status", a_run)
    assert (result.exit_code, as_json("status", a_run)["last_step"]) == (3, 12)
    assert result.stdout.count("seed: 1 -> 2") == 1
    assert result.stdout.endswith("differs:\n    seed: 1 -> 2\n  next: undo it\n")


@pytest.mark.parametrize(
    ("outcome", "code"), [("preempted", 75), ("halted", 4), ("numerics", 5), ("refused", 3)]
)
def test_status_exits_with_the_last_outcome(a_run, outcome, code):
    """The exit code is that of the newest attempt, so that a job script can ask."""
    facts = json.loads((a_run / "run.json").read_text())
    facts["attempts"][-1].update(outcome=outcome, exit_code=code)
    (a_run / "run.json").write_text(json.dumps(facts))
    assert run("status", a_run).exit_code == code
    assert run("status", a_run, "--json").exit_code == code


def test_status_of_a_killed_run(a_run):
    """A run whose newest attempt never said how it ended, and which nobody runs, exits 1."""
    facts = json.loads((a_run / "run.json").read_text())
    facts["attempts"] = [{**facts["attempts"][0], "outcome": None, "exit_code": None}]
    (a_run / "run.json").write_text(json.dumps(facts))
    assert run("status", a_run).exit_code == 1
    assert as_json("status", a_run)["outcome"] == "killed"


def test_drill_hands_unknown_options_on(tmp_path, monkeypatch):
    """Options the drill does not know reach the recipe unchanged and in order."""
    given: dict = {}

    def fake(recipe, folder, **options):
        given.update(options, recipe=recipe, folder=folder)
        raise ConfigError("stop", expected="", where="", action="")

    monkeypatch.setattr("mprecipes.tools.drill.run_drill", fake)
    run("drill", "r.py", "--config", "c.yaml", "--max_steps", 12, "--kill_at_step", 7, "--seed=3",
        "--kill_at_step", 9, "--output_dir", tmp_path, "--num_processes", 2,
        "--flag", "false")  # fmt: skip
    assert given["recipe"] == Path("r.py")
    assert given["folder"] == tmp_path
    assert given["arguments"] == [
        "--config", "c.yaml", "--max_steps", "12", "--seed=3", "--flag", "false",
    ]  # fmt: skip
    assert given["kill_at_steps"] == [7, 9]
    assert given["num_processes"] == 2
    assert given["kill_during"] == "step"


def test_module_and_errors(tmp_path):
    """`python -m mprecipes` works; an error is one message on stderr and its exit code."""
    result = subprocess.run(
        [sys.executable, "-m", "mprecipes", "verify", str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"mprecipes: {tmp_path}: a folder with neither run.json")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [("status",), ("prune", "--dry_run"), ("milestone", 4, "m"), ("pin", 4),
     ("pin", 4, "--release"), ("report",)],
)  # fmt: skip
def test_a_file_in_place_of_a_run_is_refused(tmp_path, words):
    """A path is refused with what it is, not with a traceback."""
    (tmp_path / "file").write_text("x")
    command, *others = words
    options = ["--output_dir", tmp_path / "r"] if command == "report" else []
    error = run(command, tmp_path / "file", *others, *options).exception
    assert isinstance(error, ConfigError) and error.exit_code == 2
    assert error.found == "a file, or a path through one"
    assert error.expected == "the folder of a run"
    assert error.where == str(tmp_path / "file")
    assert "output_dir" in error.action


def test_square_brackets_in_a_path_are_text(a_run):
    """Rich would take them for a style: the path is printed as it was typed."""
    (a_run.parent / "[v1] x[").mkdir()
    place = a_run.rename(a_run.parent / "[v1] x[/b]")
    assert "[v1] x[/b]" in run("status", place).stdout.replace("\n", "")
    for folder in (place / "checkpoints").iterdir():
        shutil.rmtree(folder)
    assert "[v1] x[/b]: no checkpoints" in run("prune", place, "--dry_run").stdout.replace("\n", "")
    assert "[v1] x[/b]: no checkpoint to v" in run("verify", place).stdout.replace("\n", "")


def test_an_error_of_the_disk_is_one_line(monkeypatch, capsys):
    """What no command foresaw ends with the path, and with 1."""

    def fail():
        raise PermissionError(13, "Permission denied", "runs/demo")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "mprecipes: PermissionError: [Errno 13] Permission denied: 'runs/demo'\n"
    )


def test_options_may_be_typed_with_dashes(a_run, monkeypatch):
    """A command takes `--dry-run` for `--dry_run`, as recipes do; what is not its own goes on."""
    assert as_json("prune", a_run, "--dry-run", "--keep-last=1")["dry_run"] is True
    given = {}

    def run_drill(recipe, folder, **options):
        given.update(options, folder=folder)
        raise ConfigError("seen", expected="x", where="y", action="z")

    monkeypatch.setattr("mprecipes.tools.drill.run_drill", run_drill)
    run("drill", "r.py", "--output-dir", "a-b", "--kill-during", "save", "--max-steps", "3")
    assert given["folder"] == Path("a-b")
    assert (given["kill_during"], given["arguments"]) == ("save", ["--max-steps", "3"])
