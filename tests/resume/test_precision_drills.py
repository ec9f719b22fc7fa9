# SPDX-License-Identifier: Apache-2.0
"""Every precision mode, trained, killed and resumed bit-equal on one and two processes.

FP16 begins at a scale that overflows and grows every three steps, so that the kill falls where
scale, growth counter and skipped updates all matter.
"""

import json

import pytest

from mprecipes.tools.drill import run_drill
from tests.fix64 import RECIPE, options, write_rows
from tests.reading import journal, manifest

pytestmark = pytest.mark.launch
NUMERICS = {"initial_loss_scale": 2**22, "loss_scale_growth_interval": 3}
COVERING = [("fp16", 2), ("fp8", 1)]
REST = [("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16", 2), ("fp16", 1), ("fp8", 2)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """As every launch of the tests: the drill passes this environment on."""
    for name in ("MPRECIPES_CPU_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


def check(folder, precision, num_processes):
    words = options(
        write_rows(folder / "rows.jsonl"), folder, precision=precision, max_steps=16, save_steps=4,
        per_device_train_batch_size=2, global_batch_size=4, numerics=json.dumps(NUMERICS),
    )  # fmt: skip
    del words[words.index("--output_dir") :][:2]
    result = run_drill(
        RECIPE, folder / "drill", arguments=[*words, "--allow_unvalidated_fp8"],
        kill_at_steps=[10], kill_during="step", num_processes=num_processes, timeout=240.0,
    )  # fmt: skip
    assert result.equal, [row for row in result.rows if not row.equal]
    assert [(kill.step, kill.resumed_from) for kill in result.kills] == [(10, 8)]
    runs = [folder / "drill" / side for side in ("reference", "interrupted")]
    for run in runs:
        facts = manifest(run, 16)
        assert facts["precision"]["mode"] == precision
        assert facts["topology"]["world_size"] == num_processes
    lines = [journal(run) for run in runs]
    scales = [[line["loss_scale"] for line in found.values()] for found in lines]
    assert scales[0] == scales[1]
    if precision == "fp16":
        skips = [line["skipped"] for line in lines[0].values()]
        assert any(skips[:8]) and not all(skips) and len(set(scales[0][9:])) > 1
        assert manifest(runs[0], 16)["scaler"] == manifest(runs[1], 16)["scaler"]


@pytest.mark.parametrize(("precision", "num_processes"), COVERING)
def test_covering_modes(tmp_path, precision, num_processes):
    """FP16 on two processes and FP8 on one: bit-equal after SIGKILL."""
    check(tmp_path, precision, num_processes)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "num_processes"), REST)
def test_the_other_modes(tmp_path, precision, num_processes):
    """Every other mode and number of processes."""
    check(tmp_path, precision, num_processes)
