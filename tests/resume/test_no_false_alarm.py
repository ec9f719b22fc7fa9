# SPDX-License-Identifier: Apache-2.0
"""Clean resumes are released: none is halted, and warnings are counted and printed."""

import itertools
import shutil
from collections import Counter

import pytest

from tests.fix64 import options, write_rows
from tests.reading import resume_report
from tests.recipe_server import run_recipe

pytestmark = pytest.mark.faults
CELLS = list(itertools.product((1, 2), ("fp32", "bf16"), (0, 1)))  # processes, precision, workers


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "count", [pytest.param(20, id="20"), pytest.param(200, id="200", marks=pytest.mark.slow)]
)
def test_clean_resumes_are_released(count, tmp_path, capsys):
    """1 and 2 processes, FP32 and BF16, loader workers or none, other seeds and kills: 0 halts."""
    data = write_rows(tmp_path / "rows.jsonl")
    verdicts, warned, bases = Counter(), Counter(), {}
    for number in range(count):
        world_size, precision, workers = cell = CELLS[number % len(CELLS)]
        seed, kill = 1234 + number // 40, 7 + number // len(CELLS) % 3
        values = {
            "precision": precision, "dataloader_num_workers": workers, "seed": seed,
            "save_steps": 6, "max_steps": 11,
        }  # fmt: skip
        base = bases.setdefault((cell, seed, kill), tmp_path / f"base-{len(bases)}")
        if not base.exists():
            killed = run_recipe(
                options(data, base, **values), world_size=world_size,
                env={"MPRECIPES_FAULT": f"kill@step:{kill}"},
            )  # fmt: skip
            assert killed.codes == [-9] * world_size, killed.output
        run = tmp_path / f"run-{number}"
        shutil.copytree(base, run)
        ended = run_recipe(options(data, run, **values), world_size=world_size)
        report = resume_report(run, 1)
        verdicts[report["verdict"]] += 1
        warned.update(c["name"] for c in report["checks"] if c["verdict"] == "warned")
        assert ended.codes == [0] * world_size, ended.output
        assert report["observed_steps"] == 5
        shutil.rmtree(run)
    with capsys.disabled():
        print(f"\n{count} clean resumes: {dict(verdicts)}, warnings by check: {dict(warned)}")
    assert verdicts["halted"] == 0
    assert verdicts["released"] + verdicts["released_with_warnings"] == count
