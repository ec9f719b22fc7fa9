# SPDX-License-Identifier: Apache-2.0
"""Runs are launched once, again where they were cut off, and every bad end is an outcome."""

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from mprecipes.errors import ConfigError, Preempted
from mprecipes.identity.lease import Lease
from mprecipes.tools.compare_launches import outcome_of, run_jobs
from mprecipes.tools.compare_plan import parse_arms, plan_jobs
from mprecipes.tools.compare_watch import Watch
from tests import compare_stand_in
from tests.made_runs import make_run

LAUNCHER = [sys.executable, "-m", "tests.compare_stand_in"]


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Gives a function that runs fp32, bf16 and fp16 with seed 0, acting as told."""
    monkeypatch.chdir(Path(compare_stand_in.__file__).parents[1])

    def run(acts="", arms="fp32,bf16,fp16", **options):
        arguments = ["--acts", acts] if acts else []
        jobs, steps = plan_jobs(parse_arms(arms), [0], folder=tmp_path, config=None,
                                arguments=arguments, steps=12)  # fmt: skip
        watch = options.pop("watch", None) or Watch(None, jobs, steps)
        ended = run_jobs(
            jobs, launcher=LAUNCHER, recipe=Path("recipe.py"), logs=tmp_path / "logs", watch=watch,
            **{"timeout": 60.0, **options},
        )  # fmt: skip
        return {each.job.arm.name: each.outcome for each in ended}, ended

    return run


def test_every_end_is_an_outcome(go, tmp_path):
    """One fits not, one is refused; the others go on, and what they said is kept."""
    outcomes, ended = go("bf16=oom,fp16=refuse")
    assert outcomes == {"fp32": "finished", "bf16": "out_of_memory", "fp16": "refused"}
    assert "precision: refused, and said why" in ended[2].error
    assert "acting healthy" in (tmp_path / "logs" / "fp32-seed-0.log").read_text()


def test_what_finished_is_not_launched_again(go, tmp_path):
    """The second time only the run that had not finished writes its folder anew."""
    go("bf16=numerics", arms="fp32,bf16")
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/run.json")}
    outcomes, _ = go("", arms="fp32,bf16")
    assert outcomes == {"fp32": "finished", "bf16": "finished"}
    changed = [p.parts[-3] for p in times if p.stat().st_mtime_ns != times[p]]
    assert changed == ["bf16"]


def test_a_killed_run_is_launched_again(go):
    """Once is enough here; the comparison needs nobody's help."""
    assert go("fp32=dies", arms="fp32")[0] == {"fp32": "finished"}


def test_fp32_refused_stops_at_once(go, tmp_path):
    """All the others would be refused as well; the reason is in the message."""
    with pytest.raises(ConfigError) as refused:
        go("fp32=refuse")
    assert "refused" in refused.value.found
    assert "fp32, seed 0" in refused.value.where
    assert "precision: refused, and said why" in refused.value.action
    assert not (tmp_path / "bf16").exists()


def test_a_run_that_takes_too_long_is_ended(go):
    """Its outcome says so."""
    assert go("fp32=waits", arms="fp32", timeout=2.0)[0] == {"fp32": "timed out"}


def test_an_interruption_lets_runs_save_and_the_same_command_goes_on(go, tmp_path):
    """SIGINT while the second of three runs: it ends as preempted, then all finish."""

    def interrupt() -> None:
        outcome, run = None, tmp_path / "bf16" / "seed-0"
        while outcome != "killed":
            done.wait(0.05)
            with contextlib.suppress(ConfigError):  # half written
                outcome = outcome_of(run)
        os.kill(os.getpid(), signal.SIGINT)

    done = threading.Event()
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(Preempted) as stopped:
        go("bf16=waits")
    thread.join()
    assert stopped.value.exit_code == 75
    assert stopped.value.found == "interrupted with 1 of 3 runs ended"
    assert "the same command again" in stopped.value.action
    assert outcome_of(tmp_path / "bf16" / "seed-0") == "preempted"
    assert not (tmp_path / "fp16").exists()
    assert set(go("bf16=waits")[0].values()) == {"finished"}


def test_a_run_that_is_trained_elsewhere_is_waited_for(go, tmp_path):
    """A comparison that was killed leaves a launch alive: it is neither disturbed nor doubled."""
    steps = {"num_steps": 6, "horizon": 12, "eval_steps": 2}
    run = make_run(tmp_path / "fp32" / "seed-0", outcome=None, **steps)
    lease = Lease.acquire(run)

    def finish() -> None:
        facts = json.loads((run / "run.json").read_text())
        facts["attempts"][0]["outcome"] = "finished"
        (run / "run.json").write_text(json.dumps(facts))
        lease.release()

    timer = threading.Timer(1.0, finish)
    timer.start()
    assert go("", arms="fp32,bf16")[0] == {"fp32": "finished", "bf16": "finished"}
    timer.join()
    assert len((run / "journal" / "attempt-0000.jsonl").read_text().splitlines()) == 6
    assert not (tmp_path / "logs" / "fp32-seed-0.log").exists()


def test_one_run_a_device_at_a_time(go, tmp_path):
    """Two devices, three runs: each run sees one device, and both are used."""
    assert set(go("", devices=["3", "5"])[0].values()) == {"finished"}
    said = {path.read_text().split("devices ")[1][0] for path in (tmp_path / "logs").iterdir()}
    assert said == {"3", "5"}
