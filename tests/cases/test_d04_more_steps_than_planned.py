# SPDX-License-Identifier: Apache-2.0
"""Case D04: numbering began again at zero after a resume, and the newest was rotated away first.

Reports: huggingface/accelerate#3306, huggingface/accelerate#1601, huggingface/accelerate#1163.
"""

import pytest

from tests.fix64 import RECIPE, options
from tests.launching import launch
from tests.reading import checkpoint_steps, manifest, outcomes

pytestmark = pytest.mark.launch


def test_d04_thirteen_steps_and_then_three_more(tmp_path, fix64):
    """Saved every step, 3 kept: a finished run of 13 that is given 3 more leaves 14, 15 and 16."""
    run = tmp_path / "run"
    words = options(fix64, run, max_steps=13, save_steps=1, keep_last=3)
    assert launch(RECIPE, words).returncode == 0
    assert checkpoint_steps(run) == [11, 12, 13]
    words = options(fix64, run, max_steps=16, save_steps=1, keep_last=3)
    done = launch(RECIPE, [*words, "--accept", "changed_max_steps"])
    assert done.returncode == 0, done.output
    assert "resumed from step-00000013" in done.output
    assert "changed: max_steps: 13 -> 16" in done.output
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000014", "step-00000015", "step-00000016"]
    assert checkpoint_steps(run) == [14, 15, 16]
    assert manifest(run, 16)["samples_seen"] == 64
    assert outcomes(run) == ["finished", "finished"]
