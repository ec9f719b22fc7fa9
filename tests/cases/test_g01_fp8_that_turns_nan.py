# SPDX-License-Identifier: Apache-2.0
"""Case G01: FP8 training looked right and turned NaN after 40 to 80 steps.

Reports: pytorch/torchtitan#1056, pytorch/pytorch#150859, pytorch/torchtitan#865.
"""

import pytest

from mprecipes.errors import NumericsError
from tests.fix64 import options
from tests.inprocess import train, with_gradient
from tests.reading import checkpoint_steps, journal

STEPS, BAD = 100, 40


def words(data, run, precision):
    return [*options(data, run, precision=precision, max_steps=STEPS, save_steps=13, warmup_steps=5,
                     keep_last=9), "--allow_unvalidated_fp8"]  # fmt: skip


@pytest.fixture(scope="module")
def losses(tmp_path_factory, fix64):
    found = {}
    for precision in ("bf16", "fp8"):
        run = tmp_path_factory.mktemp("g01") / precision
        assert train(words(fix64, run, precision)).error is None
        found[precision] = [line["loss"] for line in journal(run).values()]
    return found


def test_g01_fp8_follows_bf16(losses):
    """100 steps on the same data from the same weights: finite, and within 5 % at the end."""
    assert len(losses["fp8"]) == STEPS
    last = {name: sum(values[-10:]) / 10 for name, values in losses.items()}
    assert last["fp8"] < 0.9 * losses["fp8"][0]
    assert abs(last["fp8"] / last["bf16"] - 1) < 0.05


def test_g01_a_nan_stops_the_run_and_names_fp8(tmp_path, fix64):
    """A NaN planted at step 40: stopped there, the last good checkpoint at 39, and a hint."""
    run = tmp_path / "run"
    done = train(words(fix64, run, "fp8"), with_gradient(float("nan"), BAD))
    error = done.error
    assert isinstance(error, NumericsError) and error.exit_code == 5
    assert error.where == f"step {BAD}" and "in precision fp8" in error.found
    assert "mprecipes probe" in error.action
    assert checkpoint_steps(run)[-1] == 39
