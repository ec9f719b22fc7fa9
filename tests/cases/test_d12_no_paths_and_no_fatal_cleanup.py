# SPDX-License-Identifier: Apache-2.0
"""Case D12: an absolute path of another machine in the state crashed a finished run's clean-up.

Report: huggingface/transformers#48315.
"""

import shutil

import pytest

from tests.save_server import run_jobs


def test_d12_moved_thinned_and_resumed(tmp_path):
    """Trained to 8, moved, old ones deleted, resumed to 16: no file names the old place, exit 0."""
    old = tmp_path / "machine-one"
    run_jobs({"run": old, "action": "train", "steps": list(range(1, 9)), "keep_last": 3})
    new = tmp_path / "machine-two"
    shutil.move(old, new)
    for step in (6, 7):
        shutil.rmtree(new / "checkpoints" / f"step-{step:08d}")
    job = {"run": new, "action": "resume", "steps": list(range(9, 17)), "keep_last": 3}
    (result,) = run_jobs(job)
    assert result["status"] == 0
    assert result["value"]["step"] == 8
    assert result["value"]["candidates"] == [16, 15, 14]
    files = [path for path in new.rglob("*") if path.is_file()]
    assert len(files) == 12
    for path in files:
        assert str(tmp_path).encode() not in path.read_bytes()


@pytest.mark.parametrize("point", ["retention.before_delete", "retention.after_rename"])
def test_d12_a_failed_clean_up_does_not_fail_the_run(tmp_path, point):
    """A deletion that fails is no reason to lose the step that was just saved."""
    env = {"MPRECIPES_FAULT": f"eio@{point}"}
    job = {"run": tmp_path, "action": "train", "steps": [1, 2, 3], "keep_last": 1, "env": env}
    (result,) = run_jobs(job)
    assert result["status"] == 0
    assert result["value"]["errors"] == []
    assert result["value"]["candidates"][0] == 3
