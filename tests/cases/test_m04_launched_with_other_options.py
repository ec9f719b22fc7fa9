# SPDX-License-Identifier: Apache-2.0
"""Case M04: options changed at a resume were ignored in silence, or taken in silence.

Reports: huggingface/transformers#28867, huggingface/transformers#36303.
"""

import pytest

from tests.fix64 import RECIPE, options, write_rows
from tests.launching import launch
from tests.reading import checkpoint_steps, journal, outcomes, run_json

pytestmark = pytest.mark.launch
ORIGINAL = {"max_steps": 10, "keep_last": 9, "save_steps": 2, "precision": "bf16"}


@pytest.fixture(scope="module")
def cut_at_5(tmp_path_factory, fix64):
    """Asked to stop in step 5, the run saved it and exited with 75."""
    run = tmp_path_factory.mktemp("m04") / "run"
    done = launch(
        RECIPE, options(fix64, run, **ORIGINAL), env={"MPRECIPES_FAULT": "terminate@step:4"}
    )
    assert done.returncode != 0
    assert run_json(run)["attempts"][0]["exit_code"] == 75
    assert checkpoint_steps(run) == [2, 4, 5]
    return run


def test_m04_what_changes_training_is_refused_all_at_once(cut_at_5, tmp_path):
    """Data, length, seed, rate and precision at once: each old -> new with its flag; exit 3."""
    other = write_rows(tmp_path / "other.jsonl", 32)
    changed = {
        "seed": 77,
        "learning_rate": 5e-4,
        "seq_length": 8,
        "precision": "fp32",
        "save_steps": 3,
    }
    done = launch(RECIPE, options(other, cut_at_5, **{**ORIGINAL, **changed}))
    assert done.returncode != 0
    assert run_json(cut_at_5)["attempts"][-1]["exit_code"] == 3
    assert outcomes(cut_at_5)[-1] == "refused"
    lines = [line.strip() for line in done.output.splitlines()]
    for start, flag in (
        ("data: ", "changed_data"),
        ("seed: 1234 -> 77 ", "changed_seed"),
        ("precision: bf16 -> fp32 ", "changed_precision"),
        ("learning_rate: 0.001 -> 0.0005 ", "changed_learning_rate"),
    ):
        (line,) = [line for line in lines if line.startswith(start)]
        assert line.endswith(f"allow with --accept {flag}"), line
    assert "expected: the settings the run was interrupted with" in done.output
    assert "checkpoints/step-00000005/manifest.json: this launch differs" in done.output
    assert "next: undo the changes, or add --accept" in done.output
    assert checkpoint_steps(cut_at_5) == [2, 4, 5]
    assert max(journal(cut_at_5)) == 5


def test_m04_the_save_interval_is_taken_and_shown(cut_at_5, fix64):
    """2 -> 3 needs no flag: from 5 the run goes on, shows the change, and saves at 6, 9, 10."""
    done = launch(RECIPE, options(fix64, cut_at_5, **{**ORIGINAL, "save_steps": 3}))
    assert done.returncode == 0, done.output
    assert "resumed from step-00000005" in done.output
    assert "changed: save_steps: 2 -> 3" in done.output
    assert checkpoint_steps(cut_at_5) == [2, 4, 5, 6, 9, 10]
