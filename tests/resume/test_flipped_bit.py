# SPDX-License-Identifier: Apache-2.0
"""A flipped bit in the newest checkpoint of a real run: refused, put aside, the one before goes on.

Damage to every kind of file, in every way, is in tests/faults/test_bitflips.py; here a launch meets
one in a tensor file, and the next launch one in the manifest.
"""

import json
import shutil

import pytest

from tests.fix64 import RECIPE, options
from tests.launching import launch
from tests.reading import (
    assert_same_run,
    attempt_lines,
    checkpoint,
    checkpoint_steps,
    outcomes,
    quarantined,
    resume_report,
    run_json,
)

pytestmark = pytest.mark.launch

CHANGED = {"max_steps": 14, "save_steps": 4, "keep_last": 3}
TENSORS = "tensors-rank00000-000.safetensors"
QUARANTINED = ["step-00000008", "step-00000008.2"]
KILLED = {"MPRECIPES_FAULT": "kill@step:11"}


def flip(path, position, bit):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def started(run, attempt):
    return [line["step"] for line in attempt_lines(run, attempt)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory, fix64):
    """A run killed at step 11, with checkpoints of steps 4 and 8."""
    run = tmp_path_factory.mktemp("killed") / "run"
    launch(RECIPE, options(fix64, run, **CHANGED), env=KILLED)
    assert checkpoint_steps(run) == [4, 8]
    assert started(run, 0) == [*range(1, 12)]
    return run


def test_the_run_goes_on_from_the_one_before(tmp_path, fix64, killed):
    """First a tensor file, then the manifest: replayed, and the end is the untouched run's."""
    run, whole = shutil.copytree(killed, tmp_path / "run"), tmp_path / "whole"
    words = options(fix64, run, **CHANGED)
    assert launch(RECIPE, options(fix64, whole, **CHANGED)).returncode == 0
    for attempt, (name, fault) in enumerate([(TENSORS, KILLED), ("manifest.json", {})], start=1):
        path = checkpoint(run, 8) / name
        flip(path, path.stat().st_size // 2, bit=3)
        done = launch(RECIPE, words, env=fault)
        assert (done.returncode == 0) == (not fault), done.output
        check_refused(run, attempt, name, done.output)
        assert started(run, attempt) == [*range(5, 12 if fault else 15)]
    assert [name for name in quarantined(run) if "reason" not in name] == QUARANTINED
    assert outcomes(run) == ["killed", "killed", "finished"]
    assert checkpoint_steps(run) == [8, 12, 14]
    assert_same_run(run, whole)


def check_refused(run, attempt, name, output):
    """The refusal stands in the output and in the report, and seven steps were replayed equal."""
    aside = QUARANTINED[attempt - 1]
    assert f"step-00000008 is refused and now quarantine/{aside}: {name}: " in output
    assert f"attempt {attempt}: resumed from step-00000004, every file verified" in output
    report = resume_report(run, attempt)
    assert (report["checkpoint"], report["step"]) == ("checkpoints/step-00000004", 4)
    assert (report["verdict"], report["replayed_steps"]) == ("released_with_warnings", 7)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["bytes"]["verdict"] == "warned"
    assert checks["bytes"]["found"]["quarantined"] == [aside]
    assert checks["replay"]["verdict"] == "passed"
    assert checks["replay"]["found"] == "7 of 7 steps compared"


def test_with_only_a_damaged_one_nothing_is_trained(tmp_path, fix64, killed):
    """Exit code 3, the file by name, and no step taken from new weights."""
    run = shutil.copytree(killed, tmp_path / "run")
    shutil.rmtree(checkpoint(run, 4))
    path = checkpoint(run, 8) / TENSORS
    flip(path, path.stat().st_size - 1, bit=0)
    done = launch(RECIPE, options(fix64, run, **CHANGED))
    assert done.returncode != 0
    found = f"no checkpoint verifies:\n    step-00000008: {TENSORS}: "
    assert f"NoTrustedCheckpoint: checkpoints/: {found}" in done.output
    assert "expected: at least one whose every byte agrees with its manifest" in done.output
    assert "next: put an intact copy into checkpoints/" in done.output
    entry = run_json(run)["attempts"][-1]
    assert (entry["attempt"], entry["outcome"], entry["exit_code"]) == (1, "refused", 3)
    assert TENSORS in entry["error"]
    assert not (run / "journal" / "attempt-0001.jsonl").exists()
    assert quarantined(run) == ["step-00000008", "step-00000008.reason.json"]
    reason = json.loads((run / "quarantine/step-00000008.reason.json").read_text())
    assert [problem["path"] for problem in reason["problems"]] == [TENSORS]
