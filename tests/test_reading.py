# SPDX-License-Identifier: Apache-2.0
"""The readers that other tests judge by: each sees the difference it is there to see."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import reading


def write_run(run: Path, *, losses=(2.0, 1.5), moment=0.25, dtype=torch.float32) -> Path:
    """Writes a run of two steps with one checkpoint of two files."""
    (run / "journal").mkdir(parents=True)
    lines = [
        {"step": i, "batch_digest": "0f", "samples_seen": 8 * i, "learning_rate": 0.1, "loss": loss}
        for i, loss in enumerate(losses, start=1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "journal" / "attempt-0000.jsonl").write_text(text)
    folder = run / "checkpoints" / "step-00000002"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"step": 2}')
    save_file({"weights/w": torch.tensor([0.0, 1.0], dtype=dtype)}, folder / "a.safetensors")
    save_file({"optimizer/w/exp_avg": torch.tensor([moment])}, folder / "b.safetensors")
    return run


def test_equal_runs_are_equal(tmp_path):
    """Two runs with the same lines and bits pass."""
    reading.assert_same_run(write_run(tmp_path / "a"), write_run(tmp_path / "b"))


@pytest.mark.parametrize(
    "changed",
    [
        {"losses": (2.0, 1.5000000000000002)},
        {"losses": (2.0,)},
        {"moment": 0.25000003},
        {"dtype": torch.bfloat16},
    ],
)
def test_any_difference_fails(tmp_path, changed):
    """The last bit of a loss, a missing step, the last bit of a moment, another dtype."""
    with pytest.raises(AssertionError):
        reading.assert_same_run(write_run(tmp_path / "a"), write_run(tmp_path / "b", **changed))


def test_the_sign_of_zero_is_a_difference():
    """-0.0 equals 0.0 as a number and not as bits; a NaN equals itself as bits."""
    assert not reading.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert reading.same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert reading.same_bits(torch.tensor(1), torch.tensor(1))


def test_the_final_pass_replaces_the_first_and_a_torn_line_is_left_out(tmp_path):
    """A replayed step counts as last made."""
    run = write_run(tmp_path / "a")
    line = {
        "step": 2, "batch_digest": "1f", "samples_seen": 16, "learning_rate": 0.1, "loss": 1.25,
    }  # fmt: skip
    (run / "journal" / "attempt-0001.jsonl").write_text(json.dumps(line) + '\n{"step": 3, "lo')
    assert {step: facts[0] for step, facts in reading.trace(run).items()} == {1: "0f", 2: "1f"}
    assert reading.journal(run)[2]["loss"] == 1.25


def test_a_tensor_in_two_files_fails(tmp_path):
    """A name that two files hold is an error of the checkpoint, not a choice of the reader."""
    run = write_run(tmp_path / "a")
    save_file({"weights/w": torch.ones(1)}, reading.checkpoint(run, 2) / "c.safetensors")
    with pytest.raises(AssertionError, match="repeats"):
        reading.tensors(run, 2)
