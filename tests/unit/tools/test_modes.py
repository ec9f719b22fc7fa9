# SPDX-License-Identifier: Apache-2.0
"""The table of modes is measured, and says what this machine cannot do and why."""

import json

import torch
from typer.testing import CliRunner

from mprecipes.compute.precision import MODES
from mprecipes.tools.cli import app
from mprecipes.tools.modes import describe_modes, measure_step

CPU = torch.device("cpu")


def test_a_cpu_runs_all_but_tf32():
    """TF32 is refused with what it needs; FP16 and FP8 run without hardware, and say how."""
    rows = {row.mode: row for row in describe_modes(CPU)}
    assert {name: row.runs for name, row in rows.items()} == {
        "fp32": "yes", "tf32": "no", "bf16": "yes", "fp16": "slowly", "fp8": "slowly",
    }  # fmt: skip
    assert "CUDA device of capability 8.0+" in rows["tf32"].why and not rows["tf32"].measured
    assert "emulated" in rows["fp8"].why


def test_measured_is_what_the_table_of_modes_promises():
    """Products as the mode says; weight, gradient, sum and moment FP32 in each."""
    for name in ("fp32", "bf16", "fp16", "fp8"):
        found = measure_step(MODES[name], CPU)
        assert found.pop("product") == MODES[name].compute_dtype
        assert set(found.values()) == {"float32"} and len(found) == 4


def test_the_command_prints_the_table_and_json():
    """`mprecipes env --modes`: a row a mode with its bits; the same as JSON."""
    shown = CliRunner().invoke(app, ["env", "--modes"])
    assert shown.exit_code == 0
    assert all(text in shown.stdout for text in ("tf32", "8+7", "5+10", "4+3", "moments"))
    rows = json.loads(CliRunner().invoke(app, ["env", "--modes", "--json"]).stdout)
    assert [row["mode"] for row in rows] == list(MODES)
    assert rows[3]["scaler"] == "dynamic" and rows[0]["limitation"]
