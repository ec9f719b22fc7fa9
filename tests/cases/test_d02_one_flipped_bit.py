# SPDX-License-Identifier: Apache-2.0
"""Case D02: a flipped bit on network storage was loaded in silence and drifted the loss for days.

Report: pytorch/torchtitan#4011.
"""

import json
import shutil

import pytest

from mprecipes.errors import NoTrustedCheckpoint
from tests.cases.conftest import go_on
from tests.reading import assert_same_run, checkpoint, resume_report, run_json
from tests.toys import Run

pytestmark = pytest.mark.launch
FILES = [
    "tensors-rank00000-000.safetensors", "rank-00000.json", "pretrained.json", "SHA256SUMS",
    "manifest.json",
]  # fmt: skip


def flip(path):
    """Flips one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def problems(run, step):
    reason = json.loads((run / "quarantine" / f"step-{step:08d}.reason.json").read_text())
    return [problem["path"] for problem in reason["problems"]]


def test_d02_these_are_all_the_files(stopped):
    """The list of this case leaves no file of a launched run's checkpoint out."""
    assert sorted(path.name for path in checkpoint(stopped.path, 9).iterdir()) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
def test_d02_each_file_in_turn(stopped, copied, file):
    """The newest is refused with the file's name and the one before chosen; alone, nothing is."""
    run = copied(stopped)
    flip(checkpoint(run, 9) / file)
    assert Run(run).manager.newest_trusted().step == 6
    assert file in problems(run, 9)
    shutil.rmtree(checkpoint(run, 3))
    flip(checkpoint(run, 6) / file)
    with pytest.raises(NoTrustedCheckpoint) as caught:
        Run(run).manager.newest_trusted()
    error = caught.value
    assert f"step-00000006: {file}: " in error.found
    assert "quarantine/step-00000009: refused earlier" in error.found
    assert error.expected == "at least one whose every byte agrees with its manifest"
    assert (error.where, error.exit_code) == ("checkpoints/", 3)
    assert error.action.startswith("put an intact copy into checkpoints/")


def test_d02_launched_it_goes_on_from_the_one_before(fix64, stopped, whole, copied):
    """A flipped weight: refused by name, steps 7 to 9 repeat the journal, the end is bit-equal."""
    run = copied(stopped)
    flip(checkpoint(run, 9) / FILES[0])
    done = go_on(fix64, run)
    assert done.returncode == 0, done.output
    assert "step-00000009 is refused and now quarantine/step-00000009" in done.output
    assert FILES[0] in done.output
    assert problems(run, 9) == [FILES[0]]
    report = resume_report(run, 1)
    assert (report["step"], report["replayed_steps"]) == (6, 3)
    assert_same_run(run, whole)


def test_d02_launched_with_one_checkpoint_nothing_is_trained(fix64, stopped, copied):
    """Exit code 3 with found, expected, where and next action, and no journal of this attempt."""
    run = copied(stopped)
    for step in (3, 6):
        shutil.rmtree(checkpoint(run, step))
    flip(checkpoint(run, 9) / "manifest.json")
    done = go_on(fix64, run)
    assert done.returncode != 0
    assert "step-00000009: manifest.json: " in done.output
    assert "checkpoints/: no checkpoint verifies" in done.output
    assert "expected: at least one whose every byte agrees with its manifest" in done.output
    assert "next: put an intact copy into checkpoints/" in done.output
    assert run_json(run)["attempts"][-1]["exit_code"] == 3
    assert not (run / "journal" / "attempt-0001.jsonl").exists()
