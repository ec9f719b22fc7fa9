# SPDX-License-Identifier: Apache-2.0
"""The dtypes of a step on each engine are measured, or it is said why not."""

import pytest
import torch
from accelerate.state import AcceleratorState

from mprecipes.compute.engines import ENGINES
from mprecipes.compute.precision import MODES
from mprecipes.errors import ConfigError
from mprecipes.tools import cli_precision
from mprecipes.tools.engine_modes import MEASURED, EngineRow, measure_engines, measure_mode_here


@pytest.fixture
def fresh():
    """No Accelerator is left for the next test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "fp8"])
def test_a_step_of_one_process_is_measured(tmp_path, fresh, mode):
    """DDP's engine: products as the mode says, all else FP32."""
    row = measure_mode_here(mode, tmp_path)
    assert row == EngineRow(
        "ddp", mode, product=MODES[mode].compute_dtype, weight="float32", gradient="float32",
        accumulation="float32", reduce="float32", moment="float32",
    )  # fmt: skip


def test_an_engine_without_a_config_is_refused():
    """The file that would start it is named."""
    with pytest.raises(ConfigError, match="megatron.yaml"):
        measure_engines(["megatron"])


def test_the_table_of_engines_is_printed(capsys, monkeypatch):
    """A row with dtypes, and one with a reason; as JSON beside the modes."""
    rows = [EngineRow("zero2", "bf16", "bfloat16"), EngineRow("zero2", "tf32", why="device cpu")]
    monkeypatch.setattr("mprecipes.tools.engine_modes.measure_engines", lambda: rows)
    cli_precision.show_modes(False, engines=True)
    assert "device cpu" in capsys.readouterr().out
    cli_precision.show_modes(True, engines=True)
    assert '"engine": "zero2"' in capsys.readouterr().out


@pytest.mark.launch
@pytest.mark.slow
def test_every_engine_is_measured():
    """Each mode that an engine offers: FP32 weights, gradients, sums and moments."""
    rows = measure_engines()
    assert {row.engine for row in rows} == set(MEASURED)
    for row in rows:
        if row.mode == "tf32" or row.mode in ENGINES[row.engine].refused:
            assert row.why and not row.weight
            continue
        assert (row.product, row.why) == (MODES[row.mode].compute_dtype, "")
        kept = {row.weight, row.gradient, row.accumulation, row.reduce, row.moment}
        assert kept == {"float32"}, row
