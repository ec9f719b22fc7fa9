# SPDX-License-Identifier: Apache-2.0
"""Case C06: evaluation shared the random streams, so another cadence gave another training.

Reports: axolotl-ai-cloud/axolotl#3305, vllm-project/speculators#1026, huggingface/accelerate#4203.
"""

import pytest

from mprecipes import read_metrics
from tests.fix64 import RECIPE, options
from tests.launching import launch
from tests.reading import assert_same_state, trace

pytestmark = pytest.mark.launch


def test_parameters_do_not_depend_on_the_evaluations(tmp_path, fix64):
    """16 steps evaluated every 4, never, and cut at 8: bit-equal; step 8 is evaluated once."""
    runs = {name: tmp_path / name for name in ("every", "never", "cut")}
    shared = {"eval_fraction": 0.2, "max_steps": 16, "save_steps": 8}
    for name, run in runs.items():
        words = options(fix64, run, **shared, eval_steps=None if name == "never" else 4)
        if name == "cut":
            assert launch(RECIPE, words, env={"MPRECIPES_FAULT": "kill@step:8"}).returncode != 0
        done = launch(RECIPE, words)
        assert done.returncode == 0, done.output
    for name in ("never", "cut"):
        assert trace(runs[name]) == trace(runs["every"])
        assert_same_state(runs[name], runs["every"], 16)
    lines, torn = read_metrics(runs["cut"] / "metrics.jsonl")
    evaluated = [line["step"] for line in lines if "eval/loss" in line]
    assert (evaluated, torn) == ([0, 4, 8, 12, 16], 0)
