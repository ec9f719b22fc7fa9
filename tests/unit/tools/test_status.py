# SPDX-License-Identifier: Apache-2.0
"""What status and inspect say agrees with the run folder, also a damaged or unfinished one."""

import json
import os
import socket
import time

import pytest

from mprecipes.errors import ConfigError, VerificationError
from mprecipes.tools.status import describe_checkpoint, describe_run


@pytest.fixture
def a_run(tmp_path, folders):
    """A run that journaled 7 steps, saved at 4, and has said nothing about its end."""
    run = folders.run(tmp_path / "run", [(1, 7)], [4])
    entry = {"attempt": 0, "started": "2026-11-30T10:00:00+00:00", "ended": None, "outcome": None,
             "exit_code": None, "error": None, "step": 4, "world_size": 2}  # fmt: skip
    facts = {"schema": 1, "run_id": "0123456789ab", "wandb_id": "0123456789ab", "horizon": 12,
             "recipe": {"name": "stand_in", "version": "1.0.0", "status": "own"},
             "created": "2026-11-30T10:00:00+00:00", "attempts": [entry]}  # fmt: skip
    (run / "run.json").write_text(json.dumps(facts))
    return run


def test_killed_run(a_run):
    """Without a live process and without an outcome a run was killed; the journal's step counts."""
    facts = describe_run(a_run)
    assert (facts["outcome"], facts["running"], facts["exit_code"]) == ("killed", False, 1)
    assert facts["last_step"] == 7
    assert facts["newest_checkpoint"] == "step-00000004"
    assert facts["attempts"][0]["world_size"] == 2
    assert facts["attempts"][0]["outcome"] == "killed"


def test_running_run(a_run):
    """A live lease makes it a running one, and names the process."""
    lease = {"host": socket.gethostname(), "pid": os.getpid(), "heartbeat": time.time()}
    (a_run / "lease.json").write_text(json.dumps(lease))
    facts = describe_run(a_run)
    assert (facts["outcome"], facts["running"], facts["exit_code"]) == ("running", True, 1)
    assert facts["process"] == f"{os.getpid()} on {socket.gethostname()}"
    assert facts["attempts"][0]["outcome"] == "running"


def test_torn_journal_line(a_run):
    """A line that was torn by the kill is not the last step."""
    with open(a_run / "journal" / "attempt-0000.jsonl", "a") as file:
        file.write('{"attempt":0,"step":8,"upd')
    assert describe_run(a_run)["last_step"] == 7


def test_a_rollback_is_the_step_it_went_back_to(a_run):
    """Killed right after it, the run is at that step."""
    line = {"attempt": 0, "step": 8, "to_step": 4, "first": 48, "end": 64, "loss": 9.0,
            "grad_norm": 1.0, "reason": "loss 9"}  # fmt: skip
    with open(a_run / "journal" / "attempt-0000.jsonl", "a") as file:
        file.write(json.dumps({"rollback": line}) + "\n")
    assert describe_run(a_run)["last_step"] == 4


def test_skipped_samples_are_shown(tmp_path, folders):
    """Each range with its first and last sample; without any there is no such line."""
    path = folders.checkpoint(tmp_path / "a", 4, skipped=((1000, 1008), (2000, 2016)))
    summary, _ = describe_checkpoint(path)
    assert summary["samples skipped"] == "1,000 to 1,007, 2,000 to 2,015"
    summary, _ = describe_checkpoint(folders.checkpoint(tmp_path / "b", 4))
    assert "samples skipped" not in summary


def test_run_that_journaled_nothing(a_run):
    """Without a journal the step in `run.json` is shown."""
    (a_run / "journal" / "attempt-0000.jsonl").unlink()
    assert describe_run(a_run)["last_step"] == 4


def test_no_run(tmp_path):
    """A folder without run.json is refused with all four parts."""
    with pytest.raises(ConfigError) as caught:
        describe_run(tmp_path)
    assert caught.value.found == "no run.json"
    assert caught.value.expected
    assert caught.value.where == str(tmp_path)
    assert caught.value.action


def test_checkpoint_summary(a_run):
    """The summary counts parameters by dtype; the whole manifest comes with it."""
    summary, whole = describe_checkpoint(a_run / "checkpoints" / "step-00000004")
    assert summary["step"] == whole["step"] == 4
    assert summary["parameters"] == "6 in 1 tensors: 1 float32"
    assert summary["samples seen"] == "32"
    assert [file["rank"] for file in summary["files"]] == [0]
    assert summary["state digest, weights"] == whole["state_digests"]["weights"]


def test_damaged_manifest_is_not_summarised(a_run, folders):
    """A manifest with a flipped bit is refused, not shown."""
    folder = a_run / "checkpoints" / "step-00000004"
    folders.flip(folder / "manifest.json")
    with pytest.raises(VerificationError) as caught:
        describe_checkpoint(folder)
    assert caught.value.where.endswith("manifest.json")
    assert caught.value.found
    assert caught.value.expected
    assert caught.value.action
