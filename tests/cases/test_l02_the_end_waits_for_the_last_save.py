# SPDX-License-Identifier: Apache-2.0
"""Cases L02 and L04: a run ended while its last save was being written, or forgot to name it.

Reports: dlrover#1378, marin-community/marin#5022 (L02), NVIDIA-NeMo/Automodel#2469 (L04).
"""

import pytest

from mprecipes.checkpoint.manifest import verify_folder
from tests.fix64 import RECIPE, options
from tests.launching import launch
from tests.reading import checkpoint, checkpoint_steps, manifest, outcomes, resume_report

pytestmark = pytest.mark.launch
BESIDE = {"checkpoint": None, "max_steps": 12, "save_steps": 4}
# Half a second at each of six points: every save takes three seconds, a step some milliseconds.
POINTS = ("begin", "before_digest", "before_file", "before_sync", "before_sums", "after_rename")
SLOW = ",".join(f"slow@save.{point}" for point in POINTS)


@pytest.fixture(scope="module")
def ended(tmp_path_factory, fix64):
    """A run of 12 steps that saves beside the training, slowly, at 4, 8 and 12."""
    run = tmp_path_factory.mktemp("l02") / "run"
    done = launch(RECIPE, options(fix64, run, **BESIDE), env={"MPRECIPES_FAULT": SLOW})
    assert done.returncode == 0, done.output
    return run


def test_l02_exit_0_comes_after_the_last_publication(ended):
    """All three checkpoints are whole, and nothing unfinished is left."""
    names = sorted(path.name for path in (ended / "checkpoints").glob("*step-*"))
    assert names == ["step-00000004", "step-00000008", "step-00000012"]
    assert [verify_folder(checkpoint(ended, step)) for step in (4, 8, 12)] == [[], [], []]
    assert outcomes(ended) == ["finished"]


def test_l04_the_last_save_is_the_newest(ended, fix64):
    """There is no pointer to lag behind: a longer run resumes from 12."""
    assert manifest(ended, 12)["step"] == 12
    words = options(fix64, ended, **{**BESIDE, "max_steps": 13, "accept": ["changed_max_steps"]})
    done = launch(RECIPE, words)
    assert done.returncode == 0, done.output
    assert "resumed from step-00000012" in done.output
    found = {check["name"]: check["found"] for check in resume_report(ended, 1)["checks"]}
    assert found["bytes"]["predicted_restart_seconds"] > 0
    assert found["bytes"]["restart_seconds"] > found["bytes"]["load_seconds"] > 0


def test_l02_an_error_waits_for_the_save_in_flight_too(tmp_path, fix64):
    """Step 5 fails while step 4 is being written: 4 is whole, and the error is the step's own."""
    run = tmp_path / "run"
    env = {"MPRECIPES_FAULT": f"eio@step:5,{SLOW}"}
    done = launch(RECIPE, options(fix64, run, **BESIDE), env=env)
    assert done.returncode != 0
    assert "planted fault at step" in done.output
    assert outcomes(run) == ["crashed"]
    assert checkpoint_steps(run) == [4]
    assert verify_folder(checkpoint(run, 4)) == []
