# SPDX-License-Identifier: Apache-2.0
"""The command that exports says what it made, or why it made nothing."""

import json

import pytest
from typer.testing import CliRunner

from mprecipes.errors import ConfigError
from mprecipes.tools.cli import app
from tests.exporting import save, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"), tiny()).folder


def test_the_command_of_the_page(folder, tmp_path):
    """BF16 in two files; the line names step, dtype and bytes; with --json all facts."""
    command = ["export", str(folder), str(tmp_path / "a"), "--dtype", "bf16"]
    done = CliRunner().invoke(app, [*command, "--max_shard_size", "10KB"])
    assert done.exit_code == 0, done.output
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors"))
    assert done.stdout.strip() == (
        f"{tmp_path / 'a'}: step 7 as bf16, {num_bytes:,} bytes of weights, "
        "loaded and equal to the checkpoint"
    )
    assert len(list((tmp_path / "a").glob("model-*.safetensors"))) == 2
    done = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "b"), "--json"])
    facts = json.loads(done.stdout)
    assert (facts["step"], facts["dtype"], facts["run_id"]) == (7, "fp32", "0123456789ab")
    assert {"config.json", "model.safetensors", "README.md"} <= set(facts["files"])


def test_a_run_folder_is_refused_with_the_newest_checkpoint(folder, tmp_path):
    """Which of its checkpoints is meant is for the person to say."""
    run = folder.parents[1]
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "a")])
    assert isinstance(done.exception, ConfigError)
    error = done.exception
    assert (error.found, error.where) == ("a run folder", str(run))
    assert error.expected == "the folder of one checkpoint or milestone"
    assert error.action == f"name one, such as {folder}"
    assert not (tmp_path / "a").exists()
