# SPDX-License-Identifier: Apache-2.0
"""A machine is lost with its disk: the same command on an empty one goes on from the mirror."""

import json
import shutil

import pytest

from mprecipes.checkpoint.manifest import verify_folder
from tests.fix64 import RECIPE, options
from tests.launching import launch, run_command, start
from tests.reading import assert_same_state, journal, outcomes, resume_report

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def whole(tmp_path_factory, fix64):
    """The path of a run of ten steps that was never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = launch(RECIPE, options(fix64, run))
    assert done.returncode == 0, done.output
    return run


def test_an_empty_disk_goes_on_from_the_mirror(tmp_path, fix64, whole):
    """Killed after step 5 was mirrored, the run folder gone: the end is bit-equal all the same, and
    the mirror then has the end, too, which `verify --all` reads and finds whole."""
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    policy = json.dumps({"synchronous": True, "mirror": f"file://{mirror}"})
    words = options(fix64, run, checkpoint=policy)
    there = mirror / "run" / "checkpoints"
    fault = ",".join(["slow@step:7"] * 240)  # two minutes, in which step 5 reaches the mirror
    with start(RECIPE, words, env={"MPRECIPES_FAULT": fault}) as running:
        running.wait_until((there / "step-00000005" / "manifest.json").exists)
        running.end()
    assert max(journal(run)) <= 7
    shutil.rmtree(run)
    done = launch(RECIPE, words)
    assert done.returncode == 0, done.output
    assert "step 5 was fetched from the mirror and verifies" in done.output
    assert outcomes(run) == ["finished"]
    assert resume_report(run, 0)["step"] == 5
    assert sorted(journal(run)) == [6, 7, 8, 9, 10]
    assert_same_state(run, whole, 10)
    assert [verify_folder(folder) for folder in sorted(there.iterdir())] == [[], []]
    done = run_command(["mprecipes", "verify", run, "--all"])
    assert done.returncode == 0, done.output
    assert "mirrored checkpoint" in done.output
