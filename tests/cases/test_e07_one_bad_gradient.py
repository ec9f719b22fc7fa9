# SPDX-License-Identifier: Apache-2.0
"""Case E07: one NaN gradient went through clipping and poisoned every weight.

Reports: ml-explore/mlx-lm#1658, kyutai-labs/pocket-tts#262, verl-project/verl-omni#539.
"""

import pytest
import torch

from mprecipes.errors import NumericsError
from tests.fix64 import options
from tests.inprocess import train, with_gradient
from tests.reading import checkpoint_steps, journal, tensors

NAN = float("nan")


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_e07_skipped_by_policy(tmp_path, fix64, precision, capsys):
    """Weights after step 3 are those after step 2, all finite; the step is told by number."""
    run = tmp_path / "run"
    words = options(fix64, run, precision=precision, max_steps=3, save_steps=1, keep_last=3,
                    numerics='{"on_numeric_failure": "skip"}')  # fmt: skip
    done = train([*words, "--allow_unvalidated_fp8"], with_gradient(NAN, 3))
    assert done.error is None
    before, after = tensors(run, 2), tensors(run, 3)
    for name in before:
        assert torch.equal(before[name], after[name]) and after[name].isfinite().all(), name
    assert [line["skipped"] for line in journal(run).values()] == [False, False, True]
    assert journal(run)[3]["grad_norm"] == "nan" and journal(run)[3]["updates"] == 2
    assert "step 3 skipped: loss" in capsys.readouterr().out


def test_e07_stopped_by_default(tmp_path, fix64):
    """Exit 5 before the update, with the step; the last good checkpoint is step 2."""
    run = tmp_path / "run"
    words = options(fix64, run, precision="bf16", max_steps=5, save_steps=1)
    done = train(words, with_gradient(NAN, 3))
    assert isinstance(done.error, NumericsError) and done.error.exit_code == 5
    assert done.error.where == "step 3" and "gradient norm nan" in done.error.found
    assert checkpoint_steps(run)[-1] == 2
    assert all(p.isfinite().all() for p in done.parameters().values())
