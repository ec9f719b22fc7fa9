# SPDX-License-Identifier: Apache-2.0
"""Case D10: the pointer to the latest checkpoint was absolute, or pointed at one that was deleted.

Reports: deepseek-ai/DeepSpec#74, NVIDIA-NeMo/Automodel#717, mosaicml/composer#1037.
There is no pointer here: what is newest is read from the manifests each time.
"""

import shutil

from tests.save_server import run_jobs


def trained(folder):
    (result,) = run_jobs({"run": folder, "action": "train", "steps": [1, 2], "keep_last": 3})
    assert result["value"]["candidates"] == [2, 1]


def resumed(folder):
    (result,) = run_jobs({"run": folder, "action": "resume"})
    assert result["status"] == 0
    return result["value"]


def test_d10_a_moved_folder_resumes_from_the_same_step(tmp_path):
    """After a move to another path the same checkpoint is found, verified and restored."""
    trained(tmp_path / "here")
    before = resumed(tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "elsewhere")
    after = resumed(tmp_path / "elsewhere")
    assert after["step"] == 2
    assert after == before


def test_d10_without_the_newest_the_one_before_is_taken(tmp_path):
    """Deleting the newest folder by hand leaves nothing that points at it."""
    trained(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000002")
    found = resumed(tmp_path)
    assert found["step"] == 1
    assert found["digests_agree"]
    assert found["problems"] == []


def test_d10_a_dangling_link_in_the_folder_is_passed_over(tmp_path):
    """A `latest` link of somebody else's, pointing nowhere, changes nothing."""
    trained(tmp_path)
    (tmp_path / "checkpoints" / "latest").symlink_to("/absent/step-00000009")
    assert resumed(tmp_path)["step"] == 2
