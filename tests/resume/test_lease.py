# SPDX-License-Identifier: Apache-2.0
"""One run folder, one writer: of two launches one trains, and a dead one's hold is taken over."""

import re

import pytest

from tests.fix64 import RECIPE, options
from tests.launching import start
from tests.reading import attempt_lines, checkpoint_steps, outcomes, run_json

pytestmark = pytest.mark.launch


def journaled(run, attempt):
    path = run / "journal" / f"attempt-{attempt:04d}.jsonl"
    return path.exists() and len(attempt_lines(run, attempt)) > 0


def test_two_launches_at_once_and_a_dead_one(tmp_path, fix64):
    """One of two trains, the other names it and ends with 2; killed, its lease goes to a third."""
    run = tmp_path / "run"
    words = options(fix64, run, max_steps=5000, save_steps=5000)
    with start(RECIPE, words) as one, start(RECIPE, words) as other:
        one.wait_until(lambda: one.process.poll() is not None or other.process.poll() is not None)
        refused, trains = (one, other) if other.process.poll() is None else (other, one)
        output = refused.finish().output
        trains.wait_until(lambda: journaled(run, 0))
        (holder,) = trains.workers().values()
        assert f"RunFolderBusy: {run / 'lease.json'}: process {holder.pid} on " in output
        assert "(attempt 0) is running here, last heartbeat" in output
        assert "expected: no other live process in this run folder" in output
        assert f"next: wait for it, or stop it (kill {holder.pid})" in output
        assert re.search(r"exitcode *: 2 ", output)
        assert outcomes(run) == [None]
        holder.kill()
        trains.finish()
    assert (run / "lease.json").exists()
    journal = (run / "journal" / "attempt-0000.jsonl").read_bytes()
    with start(RECIPE, words) as third:
        third.wait_until(lambda: journaled(run, 1))
        third.process.terminate()
        output = third.finish().output
    first, second = run_json(run)["attempts"]
    assert (first["outcome"], first["exit_code"]) == ("killed", 1), output
    assert second["outcome"] == "preempted"
    assert second["lease_taken_from"] == f"process {holder.pid} on {first['host']} (attempt 0)"
    assert not (run / "lease.json").exists()
    assert attempt_lines(run, 1)[0]["step"] == 1
    assert checkpoint_steps(run) == [second["step"]]
    assert (run / "journal" / "attempt-0000.jsonl").read_bytes() == journal
