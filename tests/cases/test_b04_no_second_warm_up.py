# SPDX-License-Identifier: Apache-2.0
"""Case B04: a scheduler that was not saved began again from its warm-up after a resume.

Reports: huggingface/accelerate#1673, deepspeedai/DeepSpeed#3875, huggingface/transformers#24656,
huggingface/transformers#25863. Here no scheduler is saved: the rate is a function of the number of
updates, which is part of the manifest; the plain run is tried.
"""

import json

import pytest

from tests.cases.conftest import go_on
from tests.reading import attempt_lines, checkpoint, manifest, run_json

pytestmark = pytest.mark.launch


def test_b04_rate_of_the_first_step_after_the_cut(cosine_cut):
    """20 steps, warm-up 4, peak 1e-3, cut at 10: the new process begins with 6.913417e-04."""
    first = attempt_lines(cosine_cut, 1)[0]
    assert first["step"] == 11
    assert first["learning_rate"] == pytest.approx(6.913417e-04, rel=1e-6)
    assert manifest(cosine_cut, 10)["updates"] == 10


def test_b04_without_its_number_of_updates_no_checkpoint_is_used(fix64, stopped, copied):
    """Where every checkpoint lost the counter, the run ends with exit code 3 and trains no step."""
    run = copied(stopped)
    for step in (3, 6, 9):
        path = checkpoint(run, step) / "manifest.json"
        values = json.loads(path.read_text())
        del values["updates"]
        path.write_text(json.dumps(values, indent=1) + "\n")
    done = go_on(fix64, run)
    assert done.returncode != 0
    assert "no checkpoint verifies" in done.output
    assert "updates" in done.output
    assert "expected: at least one whose every byte agrees with its manifest" in done.output
    assert "next: put an intact copy into checkpoints/" in done.output
    assert run_json(run)["attempts"][-1]["exit_code"] == 3
    assert not (run / "journal" / "attempt-0001.jsonl").exists()
