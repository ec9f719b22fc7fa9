# SPDX-License-Identifier: Apache-2.0
"""Case D07: old checkpoints were deleted before the new one was written; a limit of 0 took all.

Reports: bghira/SimpleTuner#2989, huggingface/transformers#25136.
"""

import subprocess

import pytest

from mprecipes.checkpoint.manifest import verify_folder
from mprecipes.checkpoint.policy import CheckpointPolicy, checkpoint_policy
from mprecipes.errors import ConfigError
from mprecipes.identity.config import parse_config
from tests.fix64 import RECIPE
from tests.house_rules import load_config_class
from tests.save_server import run_jobs

LARGE = {"width": 256, "num_layers": 8}  # about 7 MB of state


@pytest.mark.parametrize("action", ["enospc", "eio"])
@pytest.mark.parametrize(
    "point", ["save.before_file", "save.in_file", "save.before_manifest", "save.before_publish"]
)
def test_d07_a_failed_save_leaves_the_one_before(tmp_path, action, point):
    """Of one kept, it is there, whole and visible alone; the failure is told and a later save
    goes through and only then takes its place."""
    job = {"run": tmp_path, "action": "train", "keep_last": 1}
    fault = {"MPRECIPES_FAULT": f"{action}@{point}:2"}
    (result,) = run_jobs({**job, "steps": [1, 2], "env": fault})
    assert result["status"] == 0
    assert [(e["kind"], e["step"]) for e in result["value"]["errors"]] == [("CheckpointError", 2)]
    assert result["value"]["candidates"] == [1]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000001"]
    assert verify_folder(tmp_path / "checkpoints" / "step-00000001") == []
    (result,) = run_jobs({**job, "action": "resume", "steps": [2]})
    assert result["value"]["step"] == 1
    assert result["value"]["candidates"] == [2]


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for one save of LARGE (and its margin), not for a second."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=27m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_d07_a_disk_that_is_really_full(small_disk):
    """The second of two saves does not fit: the first verifies, and nothing half is visible."""
    job = {"run": small_disk, "keep_last": 1, "sizes": LARGE}
    (result,) = run_jobs({**job, "action": "train", "steps": [1, 2]})
    assert [error["step"] for error in result["value"]["errors"]] == [2]
    assert result["value"]["candidates"] == [1]
    assert verify_folder(small_disk / "checkpoints" / "step-00000001") == []
    (result,) = run_jobs({**job, "action": "resume"})
    assert result["value"]["step"] == 1
    assert result["value"]["names"] == ["step-00000001"]


@pytest.mark.parametrize("keep_last", [0, -1])
def test_d07_keeping_none_is_refused_at_start(keep_last):
    """By the recipe's options, before anything starts, and by the policy itself."""
    words = ["--output_dir", "x", f"--keep_last={keep_last}"]
    with pytest.raises(ConfigError) as caught:
        parse_config(load_config_class(RECIPE), words)
    assert "keep_last" in caught.value.found
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError):
        CheckpointPolicy(keep_last=keep_last)
    config, _ = parse_config(load_config_class(RECIPE), ["--output_dir", "x", "--keep_last", "1"])
    assert checkpoint_policy(config).keep_last == 1
