# SPDX-License-Identifier: Apache-2.0
"""Case C02: a missing or damaged file of random states was passed over in silence.

Reports: huggingface/accelerate#4283, huggingface/accelerate#4308, TensorAuto/OpenTau#180,
redai-studio/Relax#317.
"""

import json
import shutil

import pytest

from tests.cases.conftest import go_on
from tests.reading import assert_same_run, checkpoint, quarantined, resume_report, run_json

pytestmark = pytest.mark.launch


def test_c02_removed_and_junk_random_states_are_refused(fix64, stopped, whole, copied):
    """Removed in the newest, junk in the one before: both are set aside, step 3 goes on exactly."""
    run = copied(stopped)
    (checkpoint(run, 9) / "rank-00000.json").unlink()
    (checkpoint(run, 6) / "rank-00000.json").write_bytes(b"\x80junk" * 100)
    done = go_on(fix64, run)
    assert done.returncode == 0, done.output
    assert "resumed from step-00000003, every file verified" in done.output
    assert quarantined(run)[::2] == ["step-00000006", "step-00000009"]
    for step in (6, 9):
        reason = json.loads((run / "quarantine" / f"step-{step:08d}.reason.json").read_text())
        assert [problem["path"] for problem in reason["problems"]] == ["rank-00000.json"]
    report = resume_report(run, 1)
    assert (report["step"], report["verdict"]) == (3, "released_with_warnings")
    assert report["checks"][0]["found"]["quarantined"] == ["step-00000009", "step-00000006"]
    assert_same_run(run, whole)


def test_c02_without_another_checkpoint_the_run_ends(fix64, stopped, copied):
    """With nothing to fall back to it exits with 3, names the file, and trains no step."""
    run = copied(stopped)
    for step in (3, 6):
        shutil.rmtree(checkpoint(run, step))
    (checkpoint(run, 9) / "rank-00000.json").unlink()
    done = go_on(fix64, run)
    assert done.returncode != 0
    assert "step-00000009: rank-00000.json" in done.output
    assert "expected: at least one whose every byte agrees with its manifest" in done.output
    assert "checkpoints/: no checkpoint verifies" in done.output
    assert "next: put an intact copy into checkpoints/" in done.output
    assert run_json(run)["attempts"][-1]["exit_code"] == 3
    assert not (run / "journal" / "attempt-0001.jsonl").exists()
