# SPDX-License-Identifier: Apache-2.0
"""One rung at a time, each on record, and none unless asked for."""

import json

import pytest
import torch

from mprecipes.compute.fallback import Descent, fall_back, next_rung, read_descent
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.precision import MODES
from mprecipes.errors import ConfigError, FellBack, NumericsError
from mprecipes.identity.outcome import judge

CPU = torch.device("cpu")
POLICY = NumericsPolicy(on_numeric_failure="fallback")
ERROR = NumericsError("loss nan", expected="finite", where="step 7", action="look")


def record(folder, rungs):
    fell = {"outcome": "fell_back", "exit_code": 75}
    attempts = [{"attempt": n, **fell, "fallback": rung} for n, rung in enumerate(rungs)]
    facts = {"schema": 1, "run_id": "0123456789ab", "wandb_id": "0123456789ab", "recipe": {},
             "created": "2026-11-30T10:00:00+00:00", "horizon": 100,
             "attempts": [*attempts, {"attempt": len(rungs), "outcome": None}]}  # fmt: skip
    (folder / "run.json").write_text(json.dumps(facts))


def descend(folder, mode, modules=("m.0.down",)):
    """Takes rungs until there is none; gives (rung, what it said) and the last descent."""
    rungs = []
    while True:
        record(folder, rungs)
        descent = read_descent(str(folder), MODES[mode], POLICY)
        rung = next_rung(descent, modules, CPU)
        if rung is None:
            return rungs, descent
        rungs.append({**rung, "step": 7})


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("fp8", ["keep_in_fp32", "precision bf16", "learning_rate", "precision fp32"]),
        ("fp16", ["keep_in_fp32", "precision bf16", "learning_rate", "precision fp32"]),
        ("bf16", ["keep_in_fp32", "learning_rate", "precision fp32"]),
        ("fp32", ["learning_rate"]),
    ],
)
def test_the_rungs_of_each_mode(tmp_path, mode, expected):
    """Module in FP32, BF16, half the learning rate, FP32: each once, and the bottom is told."""
    rungs, last = descend(tmp_path, mode)
    found = [" ".join(filter(None, (rung["rung"], rung.get("mode")))) for rung in rungs]
    assert found == expected
    assert last.mode.name == "fp32" and last.learning_rate_factor == 0.5
    assert last.policy.keep_in_fp32 == (("m.0.down",) if len(expected) > 1 else ())
    assert last.accepted == ("changed_precision", "changed_fallback")
    assert last.story()[-1].startswith("fallback since step 7: ")


def test_a_file_in_place_of_the_run_folder_is_refused(tmp_path):
    """The path is named before anything is built."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError) as caught:
        read_descent(str(tmp_path / "file"), MODES["bf16"], POLICY)
    assert caught.value.found == "a file, or a path through one"
    assert caught.value.where == str(tmp_path / "file")


def test_a_failure_without_a_place_skips_the_first_rung(tmp_path):
    """No module is held where none was seen."""
    assert next_rung(Descent(MODES["fp8"], POLICY), (), CPU) == {
        "rung": "precision", "mode": "bf16",
    }  # fmt: skip


def test_nothing_happens_unless_asked_for(tmp_path):
    """With `stop` recorded rungs are not taken, and the failure stays a failure."""
    record(tmp_path, [{"rung": "precision", "mode": "fp32", "step": 1}])
    descent = read_descent(str(tmp_path), MODES["bf16"], NumericsPolicy())
    assert (descent.mode.name, descent.rungs, descent.accepted) == ("bf16", (), ())
    assert fall_back(ERROR, descent, ["m"], CPU, 7) is ERROR


def test_the_rung_is_what_run_json_keeps(tmp_path):
    """Exit 75, the next launch's rung with step and reason in the outcome's facts."""
    raised = fall_back(ERROR, Descent(MODES["fp16"], POLICY), ["m.0"], CPU, 7)
    assert isinstance(raised, FellBack) and raised.where == "step 7"
    assert raised.found == "loss nan" and raised.expected == "finite"
    assert "launch the same command again" in raised.action and "m.0 held in FP32" in raised.action
    facts = judge(raised, 0)
    assert (facts["outcome"], facts["exit_code"]) == ("fell_back", 75)
    assert facts["fallback"] == {
        "rung": "keep_in_fp32", "modules": ["m.0"], "step": 7, "reason": "loss nan",
    }  # fmt: skip


def test_the_bottom_is_an_error(tmp_path):
    """When every rung was taken the run ends with exit 5 and says so."""
    _, last = descend(tmp_path, "bf16")
    raised = fall_back(ERROR, last, ["m"], CPU, 7)
    assert isinstance(raised, NumericsError) and raised.exit_code == 5
    assert "every rung of the fallback was taken" in raised.found
