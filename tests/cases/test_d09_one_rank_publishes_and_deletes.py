# SPDX-License-Identifier: Apache-2.0
"""Case D09: all ranks made, renamed or deleted the same folder, one under another's hands.

Reports: huggingface/transformers#28015, huggingface/transformers#20988,
NVIDIA-NeMo/Automodel#3686, allenai/OLMo#894.
"""

import re
import time
from pathlib import Path

import pytest

import mprecipes
from mprecipes.checkpoint.manifest import read_manifest, verify_folder
from tests.save_server import run_jobs

NUM_STEPS = 20


def all_points():
    """Every fault point of saving and keeping checkpoints that the package has."""
    folder = Path(mprecipes.__file__).parent / "checkpoint"
    text = "".join(path.read_text() for path in sorted(folder.glob("*.py")))
    return sorted(set(re.findall(r'fault_point\("((?:save|retention)\.\w+)"', text)))


@pytest.mark.timeout(120)
def test_d09_two_ranks_that_stumble(tmp_path):
    """20 saves with random waits at every file operation of each rank: exactly two whole
    checkpoints are left, each with the files of both ranks, and nothing went wrong."""
    points = all_points()
    assert len(points) >= 15
    fault = {"MPRECIPES_FAULT": ",".join(f"delay@{point}" for point in points)}
    job = {"run": tmp_path, "action": "train", "keep_last": 2, "world_size": 2, "env": fault}
    steps = list(range(1, NUM_STEPS + 1))
    began = time.monotonic()
    results = run_jobs(*({**job, "rank": rank, "steps": steps} for rank in (0, 1)))
    assert time.monotonic() - began < 100
    for result in results:
        assert result["status"] == 0, result
        assert result["value"]["errors"] == []
    # rank 1 may still see what rank 0, which alone deletes, is deleting at that moment
    assert results[0]["value"]["candidates"] == [20, 19]
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step-00000019", "step-00000020"]
    for folder in folders:
        assert verify_folder(folder) == []
        written = {(entry.rank, entry.path[:6]) for entry in read_manifest(folder).files}
        assert written == {(0, "rank-0"), (1, "rank-0"), (0, "tensor"), (1, "tensor")}
        assert (folder / "rank-00000.json").exists() and (folder / "rank-00001.json").exists()
    assert not (tmp_path / "quarantine").exists()
