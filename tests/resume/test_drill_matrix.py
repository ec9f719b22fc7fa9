# SPDX-License-Identifier: Apache-2.0
"""Drills over processes, kills, loader workers and evaluation: bit-equal in every one of them.

64 training rows, 4 a step: epochs of 16 steps, 24 steps in all, dropout on, a checkpoint every 5
steps. `make test` drills each kill once, and each pair of the other factors' values; `make
test-full` drills the whole matrix.
"""

import itertools
import json
from typing import NamedTuple

import pytest

from mprecipes.tools.drill import run_drill
from tests.fix64 import RECIPE, options, write_rows

pytestmark = pytest.mark.launch


class Kill(NamedTuple):
    """Where a drill kills, and what must come of it: (last step, step resumed from) per kill."""

    steps: tuple[int, ...]
    during: str
    expected: list[tuple[int, int]]
    replayed: int


KILLS = {
    "epoch_0": Kill((7,), "step", [(7, 5)], 2),
    "epoch_1": Kill((22,), "step", [(22, 20)], 2),
    "epochs_last_step": Kill((16,), "step", [(16, 15)], 1),
    "twice": Kill((8, 7), "step", [(8, 5), (7, 5)], 5),  # the second inside the probation
    "save": Kill((12,), "save", [(15, 10)], 5),
}
COVERING = [
    ("epoch_0", 2, 2, True),
    ("epoch_1", 1, 0, True),
    ("epochs_last_step", 2, 0, False),
    ("twice", 1, 2, False),
    ("save", 2, 2, True),
]
REST = [
    case for case in itertools.product(KILLS, (1, 2), (0, 2), (False, True)) if case not in COVERING
]


def drill(folder, name, num_processes, num_workers, evaluates):
    """Drills the recipe; the held-out rows are 16 more, so that training has 64 either way."""
    kill = KILLS[name]
    changed = {"max_steps": 24, "save_steps": 5, "dataloader_num_workers": num_workers}
    changed |= {"per_device_train_batch_size": 2, "global_batch_size": 4}
    if evaluates:
        changed |= {"eval_fraction": 0.2, "eval_steps": 4}
    data = write_rows(folder / "rows.jsonl", 80 if evaluates else 64)
    words = options(data, folder, **changed)
    del words[words.index("--output_dir") :][:2]
    return run_drill(
        RECIPE,
        folder / "drill",
        arguments=words,
        kill_at_steps=kill.steps,
        kill_during=kill.during,
        num_processes=num_processes,
        timeout=240.0,
    )


def evaluations(run):
    """Gives the held-out loss by step as last logged, as hex."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {x["step"]: x["eval/loss"].hex() for x in lines if "eval/loss" in x}


def check(folder, name, num_processes, num_workers, evaluates):
    result = drill(folder, name, num_processes, num_workers, evaluates)
    assert result.equal, [row for row in result.rows if not row.equal]
    kill = KILLS[name]
    assert [(found.step, found.resumed_from) for found in result.kills] == kill.expected
    counts = {row.what: row.compared for row in result.rows}
    assert (counts["loss"], counts["samples (batch digest)"]) == (24, 24)
    assert counts["replayed steps"] == kill.replayed
    assert counts["resume report"] == 1
    assert (counts["parameters"], counts["optimizer state"]) == (28864, 57748)
    runs = [folder / "drill" / side for side in ("reference", "interrupted")]
    for run in runs:
        facts = json.loads((run / "checkpoints/step-00000024/manifest.json").read_text())
        assert (facts["samples_seen"], facts["data"]["num_sequences"]) == (96, 64)
        assert facts["topology"]["world_size"] == num_processes
    if evaluates:
        whole, resumed = map(evaluations, runs)
        assert list(whole) == [0, 4, 8, 12, 16, 20, 24]
        assert whole == resumed


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """As every launch of the tests: the drill passes this environment on."""
    for name in ("MPRECIPES_CPU_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


@pytest.mark.parametrize(("name", "num_processes", "num_workers", "evaluates"), COVERING)
def test_covering_drills(tmp_path, name, num_processes, num_workers, evaluates):
    """Each kind of kill once, each pair of values of the other three factors at least once."""
    check(tmp_path, name, num_processes, num_workers, evaluates)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_processes", "num_workers", "evaluates"), REST)
def test_the_rest_of_the_matrix(tmp_path, name, num_processes, num_workers, evaluates):
    """Every other combination of kill, processes, loader workers and evaluation."""
    check(tmp_path, name, num_processes, num_workers, evaluates)
