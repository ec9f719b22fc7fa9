# SPDX-License-Identifier: Apache-2.0
"""Case D01: a job killed while saving left a folder that looked newest, and was resumed from it.

Reports: huggingface/transformers#35782, huggingface/transformers#35525, NVIDIA-NeMo/Speech#7952,
vllm-project/speculators#739.
"""

import signal

import pytest

from tests.cases.conftest import go_on
from tests.reading import assert_same_run, resume_report, run_json
from tests.save_server import run_jobs

POINTS = [
    "save.begin",
    "save.before_file",
    "save.in_file",
    "save.before_sync",
    "save.after_file",
    "save.before_rank_state",
    "save.after_rank_state",
    "save.after_gather",
    "save.before_sums",
    "save.before_manifest",
    "save.after_manifest",
    "save.before_publish",
    "save.after_publish",
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The state of a run of five steps that saved each and was never killed."""
    run = tmp_path_factory.mktemp("d01") / "run"
    job = {"run": run, "keep_last": 9}
    run_jobs({**job, "action": "train", "steps": [1, 2, 3, 4, 5]})
    (result,) = run_jobs({**job, "action": "resume"})
    return result["value"]["digests"]


@pytest.mark.parametrize("point", POINTS)
def test_d01_killed_anywhere_in_the_second_save(tmp_path, reference, point):
    """Save 1 or 2 is resumed, nothing half is left or chosen, and the end is bit-equal."""
    job = {"run": tmp_path, "keep_last": 9}
    fault = {"MPRECIPES_FAULT": f"kill@{point}:2"}
    (killed,) = run_jobs({**job, "action": "train", "steps": [1, 2, 3, 4, 5], "env": fault})
    assert killed == {"status": -signal.SIGKILL}
    (look,) = run_jobs({**job, "action": "resume"})
    published = [1, 2] if point == "save.after_publish" else [1]
    assert look["status"] == 0
    assert look["value"]["step"] == published[-1]
    assert look["value"]["names"] == [f"step-{step:08d}" for step in published]
    assert look["value"]["problems"] == []
    assert look["value"]["refused"] == []
    (again,) = run_jobs({**job, "action": "resume", "steps": [*range(published[-1] + 1, 6)]})
    assert again["value"]["digests"] == reference
    assert again["value"]["candidates"] == [5, 4, 3, 2, 1]


@pytest.mark.launch
def test_d01_launched_the_same_command_goes_on(tmp_path, fix64, whole):
    """Killed before the second save is published: the first is resumed, the folder is cleaned."""
    run = tmp_path / "run"
    assert go_on(fix64, run, env={"MPRECIPES_FAULT": "kill@save.before_publish:6"}).returncode != 0
    left = [path.name for path in (run / "checkpoints").iterdir()]
    assert [name for name in left if name.startswith(".staging-step-00000006")]
    done = go_on(fix64, run)
    assert done.returncode == 0, done.output
    assert resume_report(run, 1)["step"] == 3
    assert [each["outcome"] for each in run_json(run)["attempts"]] == ["killed", "finished"]
    assert not list((run / "checkpoints").glob(".*"))
    assert_same_run(run, whole)
