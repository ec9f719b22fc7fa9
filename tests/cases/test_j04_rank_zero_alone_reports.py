# SPDX-License-Identifier: Apache-2.0
"""Case J04: every rank opened a run of its own.

Reports: huggingface/accelerate#644, huggingface/accelerate#1294.
"""

import json

import pytest

from tests.reading import run_json
from tests.wandb_reading import history, records, segments

pytestmark = pytest.mark.launch
TARGETS_A_ROW = 15


def test_j04_two_processes_open_one_run(tracked_two):
    """One folder, opened by the one process that has the run's id, with every step once."""
    (segment,) = segments(tracked_two.path)
    assert records(segment, "run")[0]["run_id"] == run_json(tracked_two.path)["wandb_id"]
    assert [r["exit_code"] for r in records(segment, "exit")] == [0]
    steps = [row["train/step"] for row in history(segment) if "train/loss" in row]
    assert steps == [1, 2, 3, 4]


def test_j04_the_loss_is_the_mean_over_the_tokens_of_both_ranks(tracked_two):
    """What W&B shows is the sum over both ranks' micro-batches, divided by all their targets."""
    spied = [json.loads(line) for line in tracked_two.spied.read_text().splitlines()]
    by_rank = [[line for line in spied if line["rank"] == rank] for rank in (0, 1)]
    assert [len(lines) for lines in by_rank] == [4, 4]
    (segment,) = segments(tracked_two.path)
    shown = [row["train/loss"] for row in history(segment) if "train/loss" in row]
    for loss, first, second in zip(shown, *by_rank, strict=True):
        targets = TARGETS_A_ROW * (len(first["rows"]) + len(second["rows"]))
        assert loss == pytest.approx((first["loss"] + second["loss"]) / targets, rel=1e-6)
        assert loss != pytest.approx(first["loss"] / (targets / 2), rel=1e-6)


def test_the_end_of_a_run_names_its_manifests(tracked_two):
    """The saves of steps 2 and 4 are artifacts that point at their manifests."""
    (segment,) = segments(tracked_two.path)
    entries = [a["manifest"]["contents"][0] for a in records(segment, "artifact")]
    folder = tracked_two.path / "checkpoints"
    assert [entry["ref"] for entry in entries] == [
        (folder / f"step-0000000{step}" / "manifest.json").as_uri() for step in (2, 4)
    ]
