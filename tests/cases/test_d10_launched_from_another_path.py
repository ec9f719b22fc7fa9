# SPDX-License-Identifier: Apache-2.0
"""Case D10: the pointer to the newest checkpoint was absolute, or its target had been deleted.

Reports: deepseek-ai/DeepSpec#74, NVIDIA-NeMo/Automodel#717, mosaicml/composer#1037. Here nothing
points: the newest is read from the manifests at each start, and `run.json` names what was published
last, so that a missing one is called by name.
"""

import shutil

import pytest

from tests.cases.conftest import go_on
from tests.reading import assert_same_run, checkpoint, outcomes, resume_report

pytestmark = pytest.mark.launch


def test_d10_without_the_newest_the_one_before_is_taken(fix64, stopped, whole, copied):
    """Its folder deleted by hand, it is named; step 6 goes on, repeats 7 to 9, and ends equal."""
    run = copied(stopped)
    shutil.rmtree(checkpoint(run, 9))
    done = go_on(fix64, run)
    assert done.returncode == 0, done.output
    assert "resumed from step-00000006, every file verified" in done.output
    assert "step-00000009 was published and is not here: put its folder back" in done.output
    assert "on probation: 3 steps are compared with their first pass" in done.output
    assert outcomes(run) == ["killed", "finished"]
    assert resume_report(run, 1)["replayed_steps"] == 3
    assert_same_run(run, whole)
