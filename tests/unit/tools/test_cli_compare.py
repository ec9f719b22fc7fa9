# SPDX-License-Identifier: Apache-2.0
"""The command `report` writes its files, prints its verdicts, and refuses what is no run."""

import json

import pytest
import typer.testing

from mprecipes.errors import ConfigError
from mprecipes.tools import cli
from tests.made_runs import make_arm


def run(*arguments: object):
    return typer.testing.CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def paths(tmp_path):
    return make_arm(tmp_path, "fp32") + make_arm(tmp_path, "bf16", tokens_per_second=1500.0)


def test_report_prints_verdicts_and_where_it_is(tmp_path, paths):
    """Exit code 0, the arms in a table, the three files."""
    result = run("report", *paths, "--output_dir", tmp_path / "out")
    assert result.exit_code == 0
    assert "equivalent" in result.stdout
    for name in ("report.html", "report.md", "report.json"):
        assert (tmp_path / "out" / name).exists()
        assert name in result.stdout


def test_report_as_json(tmp_path, paths):
    """Stdout is the content of report.json."""
    result = run("report", *paths, "--output_dir", tmp_path / "out", "--json", "--title", "Ours")
    assert json.loads(result.stdout) == json.loads((tmp_path / "out" / "report.json").read_text())
    assert "<h1>Ours</h1>" in (tmp_path / "out" / "report.html").read_text()


def test_report_refuses_what_is_no_run(tmp_path):
    """The error is the product's own, with an address."""
    result = run("report", tmp_path, "--output_dir", tmp_path / "out")
    assert isinstance(result.exception, ConfigError)
    assert result.exception.where == str(tmp_path)
