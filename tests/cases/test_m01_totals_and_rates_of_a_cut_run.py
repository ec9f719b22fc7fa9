# SPDX-License-Identifier: Apache-2.0
"""Case M01: after a resume, all tokens ever were divided by the time since the restart.

Reports: huggingface/transformers#40560, hiyouga/LlamaFactory#7415,
NVIDIA-NeMo/Megatron-Bridge#2350.
"""

import statistics

import pytest

from mprecipes import read_metrics
from tests.cases.conftest import NUM_STEPS
from tests.reading import attempt_lines, manifest

pytestmark = pytest.mark.launch
TOKENS = 4 * 15  # targets of a step


def test_m01_totals_go_on_over_six_resumes(cut_run):
    """The manifest of step n counts 60 n tokens and 4 n samples, whatever process saved it."""
    for step in range(1, NUM_STEPS + 1):
        found = manifest(cut_run.path, step)
        assert (found["tokens_seen"], found["samples_seen"]) == (TOKENS * step, 4 * step)


def test_m01_rates_are_those_of_the_process_that_logs_them(cut_run):
    """Every logged rate is what the steps of its own process make, after six resumes too."""
    lines, _ = read_metrics(cut_run.path / "metrics.jsonl")
    logged = [line for line in lines if "perf/tokens_per_second" in line]
    assert {line["attempt"] for line in logged} >= {1, 6}
    for line in logged:
        own = attempt_lines(cut_run.path, line["attempt"])
        seconds = [x["step_seconds"] for x in own if x["step"] <= line["step"]][1:][-20:]
        expected = TOKENS / statistics.mean(seconds)
        assert line["perf/tokens_per_second"] == pytest.approx(expected, rel=1e-9), line
