# SPDX-License-Identifier: Apache-2.0
"""The rows of the resume report."""

import json

import pytest

from mprecipes.checkpoint.loading import LoadReport
from mprecipes.checkpoint.manifest import Problem
from mprecipes.checkpoint.search import Refusal
from mprecipes.compute.ranks import Ranks
from mprecipes.resume.checks import Check, Report, bytes_check, digest_check, not_restored


@pytest.fixture
def saved(run, state, save):
    """Gives a state at step 2, and the manifest of its checkpoint."""
    now = state()
    now.train(2)
    manager = now.manager(run(0))
    save(manager, 2)
    return now, manager.newest_trusted()


def test_the_bytes_row_counts_what_was_read(saved):
    """Files and bytes are those of the manifest; the restart was predicted, and took so long."""
    _, manifest = saved
    load = LoadReport(num_bytes=sum(entry.bytes for entry in manifest.files), seconds=2.0)
    load.predicted_seconds = 1.5
    check = bytes_check(manifest, [], load, 0.25)
    assert check.found["load_seconds"] == 2.0
    assert check.found["bytes_per_second"] == round(load.num_bytes / 2)
    early = check.found["restart_seconds"] - check.found["predicted_restart_seconds"]
    assert early == pytest.approx(0.5, abs=0.01)
    on_disk = [path.stat().st_size for path in manifest.folder.iterdir()]
    assert check.found["files"] == 2
    assert 0 < check.found["bytes"] < sum(on_disk)
    assert (check.verdict, check.policy, check.seconds) == ("passed", "halt", 0.25)


def test_the_bytes_row_warns_with_the_names_that_were_refused(saved):
    """The name in quarantine, or in checkpoints/ where it could not be moved."""
    problems = [Problem("a", "b", "c")]
    refusals = [Refusal("step-00000004", problems, "step-00000004.2"), Refusal("x", problems, None)]
    check = bytes_check(saved[1], refusals, LoadReport(), 0.0)
    assert check.found["quarantined"] == ["step-00000004.2", "x"]
    assert (check.verdict, check.policy) == ("warned", "warn")
    assert "look for a failing disk" in check.meaning


def test_the_digest_row_fails_on_one_changed_element(saved):
    """Equal tensors pass; two swapped elements do not, and every rank that differs is named."""
    now, manifest = saved
    assert digest_check(manifest, Ranks(), now.model, now.optimizer).verdict == "passed"
    bias = now.model.bias.detach()
    bias.copy_(bias.flip(0))
    check = digest_check(manifest, Ranks(), now.model, now.optimizer)
    assert check.verdict == "failed"
    assert list(check.found) == ["rank 0"]
    assert check.found["rank 0"]["weights"] != manifest.state_digests["weights"]
    assert check.found["rank 0"]["exp_avg"] == manifest.state_digests["exp_avg"]
    error = not_restored(check, manifest)
    assert (error.exit_code, error.expected) == (4, str(manifest.state_digests))


def test_the_digest_row_names_a_replica_that_differs(saved):
    """The other rank's digests are compared as well."""
    now, manifest = saved

    class Other(Ranks):
        def gather(self, value):
            return [value, {**value, "weights": "0" * 16}]

    check = digest_check(manifest, Other(), now.model, now.optimizer)
    assert check.verdict == "failed"
    assert list(check.found) == ["rank 1"]


def test_the_report_is_replaced_as_a_whole(tmp_path):
    """It is written atomically, checks as plain rows, and not at all without a path."""
    check = Check("bytes", "passed", "halt", 1, 1, "exact", 0.5, "read")
    path = tmp_path / "resume" / "attempt-0001.json"
    report = Report(path, {"attempt": 1}, [check])
    report.write("on_probation")
    check.verdict = "warned"
    report.write("released_with_warnings", 3)
    assert json.loads(path.read_text()) == {
        "verdict": "released_with_warnings",
        "attempt": 1,
        "checks": [
            {
                "name": "bytes",
                "verdict": "warned",
                "policy": "halt",
                "expected": 1,
                "found": 1,
                "tolerance": "exact",
                "seconds": 0.5,
                "meaning": "read",
            }
        ],
        "replayed_steps": 3,
        "observed_steps": 0,
    }
    assert [file.name for file in path.parent.iterdir()] == ["attempt-0001.json"]
    Report(None, {}, []).write("released")
