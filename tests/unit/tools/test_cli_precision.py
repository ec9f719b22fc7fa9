# SPDX-License-Identifier: Apache-2.0
"""The command `probe`: what it prints, what it leaves, how it ends."""

import json
import shutil

from typer.testing import CliRunner

from mprecipes.tools.cli import app
from mprecipes.tools.cli_precision import show_modes
from tests.fix64 import RECIPE, options, write_rows


def words(tmp_path):
    """A copy of the recipe, so that the record lies beside it, and its options."""
    copy = shutil.copy(RECIPE, tmp_path / "recipe.py")
    given = options(write_rows(tmp_path / "rows.jsonl"), tmp_path / "x")
    place = given.index("--output_dir")
    return [str(copy), *given[:place], *given[place + 2 :]]


def test_a_probe_prints_a_verdict_and_leaves_record_and_picture(tmp_path):
    """FP8 on four steps: exit 0, JSON on stdout, a record, probe.json and probe.png."""
    out = tmp_path / "out"
    done = CliRunner().invoke(
        app,
        ["probe", *words(tmp_path), "--modes", "fp8", "--steps", "4", "--json",
         "--output_dir", str(out)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [mode["mode"] for mode in found["modes"]] == ["fp32", "fp8"]
    assert (tmp_path / "validations" / found["record"]).exists()
    assert sorted(path.name for path in out.iterdir()) == ["probe.json", "probe.png"]


def test_the_audit_prints_operations_and_casts(tmp_path):
    """`--dtypes`: a table of one mode, its casts, and that the policy holds."""
    done = CliRunner().invoke(app, ["probe", *words(tmp_path), "--dtypes", "--modes", "bf16"])
    assert done.exit_code == 0, done.output
    assert "casts float32 -> bfloat16" in done.stdout
    assert "softmax, normalisation and loss compute in FP32" in done.stdout


def test_an_unknown_mode_is_refused(tmp_path):
    """The modes there are, are named."""
    done = CliRunner().invoke(app, ["probe", *words(tmp_path), "--modes", "int4"])
    assert done.exit_code != 0 and "'int4'" in str(done.exception)


def test_the_table_of_modes_is_printed(capsys):
    """A row for each mode."""
    show_modes(False)
    assert "tf32" in capsys.readouterr().out
