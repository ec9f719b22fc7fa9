# SPDX-License-Identifier: Apache-2.0
"""One rank's copy of a weight drifts by one unit in the last place: named at the next check."""

import json

import pytest

from tests import reading
from tests.fix64 import RECIPE, ROOT, options, write_rows
from tests.launching import launch

DRIFTING = ROOT / "tests" / "drifting_recipe.py"

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(
    ("every", "named_at"), [(1, 7), pytest.param(None, 11, marks=pytest.mark.slow)]
)
def test_a_drift_of_one_ulp_is_named(tmp_path, every, named_at):
    """Planted on rank 1 in step 7: exit 5 at the check, and nothing of it is published.

    Without the check this small model is compared in full when it is saved at step 10, and the
    run hears of it after the next step.
    """
    run = tmp_path / "run"
    data = write_rows(tmp_path / "rows.jsonl")
    watch = json.dumps({"replica_check_steps": every})
    words = [RECIPE, *options(data, run, max_steps=12, save_steps=5, watch=watch)]
    done = launch(DRIFTING, words, num_processes=2, env={"DRIFT": "1:7"})
    assert done.returncode != 0
    assert reading.outcomes(run) == ["numerics"], done.output
    assert reading.run_json(run)["attempts"][0]["exit_code"] == 5
    assert max(reading.journal(run)) == named_at
    if every:
        name = "model.layers.0.self_attn.q_proj.weight"
        found = f"replicas of the weights differ: rank 1 differs in {name}"
        assert f"step 7: {found} (compared with rank 0)" in done.output
    assert reading.checkpoint_steps(run) == [5]
