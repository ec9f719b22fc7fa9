# SPDX-License-Identifier: Apache-2.0
"""Runs the launches of a comparison, one after the other or one per GPU, until each has an outcome.

Whatever a run comes to, the others go on: out of memory is an outcome of its arm. A run that
finished before is not launched again, one that was cut off goes on from its newest checkpoint. An
interruption asks the runs that are going on to save, waits, and leaves no process behind. A run
that another process is training is waited for.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mprecipes.errors import ConfigError, Preempted
from mprecipes.identity.history import read_run
from mprecipes.tools.compare_plan import REFERENCE, Job
from mprecipes.tools.compare_watch import Watch
from mprecipes.tools.processes import Launching, tail, unwind_on_terminate

POLL_SECONDS = 0.2
SAVE_SECONDS = 60.0  # that an interrupted run may take to save
MAX_LAUNCHES = 3  # of a run that is cut off again and again, in one comparison


@dataclass
class Ended:
    """How a run ended: its outcome, and the end of its output where that is not "finished"."""

    job: Job
    outcome: str
    error: str | None = None


@dataclass
class _Slot:
    """One place where runs go on: a GPU, or the whole machine."""

    variables: Mapping[str, str]
    job: Job | None = None
    launching: Launching | None = None
    used: dict[str, int] = field(default_factory=dict)


def run_jobs(
    jobs: Sequence[Job],
    *,
    launcher: Sequence[str],
    recipe: Path,
    logs: Path,
    watch: Watch,
    timeout: float,
    devices: Sequence[str] = (),
) -> list[Ended]:
    """Launches what has not finished; blocks until every run has an outcome.

    Args:
        launcher: the command line before the recipe.
        logs: folder for the output of every run.
        timeout: seconds for each launch.
        devices: values of CUDA_VISIBLE_DEVICES, each with a run of its own at a time; empty for one
            run at a time with the devices there are.

    Raises:
        Preempted: interrupted; the same command goes on.
        ConfigError: an FP32 run was refused before it began: so will be all others.
    """
    logs.mkdir(parents=True, exist_ok=True)
    slots = [_Slot({"CUDA_VISIBLE_DEVICES": each}) for each in devices] or [_Slot({})]
    waiting = [*jobs]
    ended: list[Ended] = []
    with _stopping(slots, watch, jobs, ended), unwind_on_terminate():
        while waiting or any(slot.job for slot in slots):
            for slot in slots:
                if slot.job is None and waiting:
                    job = waiting.pop(0)
                    outcome = outcome_of(job.run)
                    if outcome == "finished":
                        watch.end(job, "finished", None)
                        ended.append(Ended(job, "finished"))
                        continue
                    if outcome == "running":  # of a comparison that was killed, and is still alive
                        watch.wait_for(job)
                        waiting.append(job)
                        time.sleep(POLL_SECONDS)
                        continue
                    _start(slot, job, launcher, recipe, logs, watch)
                done = _look(slot, watch, timeout)
                if done is not None:
                    ended += _judge(slot, done, logs, watch, waiting)
    return ended


def outcome_of(run: Path) -> str | None:
    """Gives the outcome of a run's last attempt; None before it has one."""
    return read_run(run).outcome if (run / "run.json").exists() else None


def log_of(job: Job, logs: Path) -> Path:
    return logs / f"{job.arm.slug}-seed-{job.seed}.log"


def _start(
    slot: _Slot, job: Job, launcher: Sequence[str], recipe: Path, logs: Path, watch: Watch
) -> None:
    if job.run.exists() and not (job.run / "run.json").exists():
        shutil.rmtree(job.run)  # killed before it wrote a word
    slot.job = job
    slot.used[job.label] = slot.used.get(job.label, 0) + 1
    watch.begin(job)
    slot.launching = Launching(
        [*launcher, str(recipe), *job.words],
        journal=job.run / "journal",
        log=log_of(job, logs),
        variables={**slot.variables, **job.variables},
    )


def _look(slot: _Slot, watch: Watch, timeout: float) -> tuple[int | None, float] | None:
    """Gives (return code, seconds) of a launch that ended or took too long, else None."""
    if slot.launching is None or slot.job is None:
        return None
    code = slot.launching.wait(POLL_SECONDS)
    for record in slot.launching.records():
        watch.record(slot.job, record)
    if code is None and slot.launching.seconds < timeout:
        return None
    slot.launching.end()
    return code, slot.launching.seconds


def _judge(
    slot: _Slot, done: tuple[int | None, float], logs: Path, watch: Watch, waiting: list[Job]
) -> list[Ended]:
    """Gives the run's end, or puts it back to be launched again; frees the slot."""
    job, (code, seconds) = slot.job, done
    assert job is not None
    slot.job = slot.launching = None
    outcome = outcome_of(job.run) or ("refused" if code else "failed")
    if code is None:
        outcome = "timed out"
    elif outcome in ("preempted", "killed") and slot.used[job.label] < MAX_LAUNCHES:
        watch.end(job, f"{outcome}, launched again", seconds)
        waiting.insert(0, job)
        return []
    watch.end(job, outcome, seconds)
    if outcome == "finished":
        return [Ended(job, outcome)]
    error = tail(log_of(job, logs))
    if outcome == "refused" and job.arm.name == REFERENCE:
        raise ConfigError(
            f"the FP32 run was refused (exit code {code})",
            expected="a recipe and a config that train in FP32 by themselves",
            where=f"{job.label}, {log_of(job, logs)}",
            action=f"correct what it says, then launch the same command again:\n{error}",
        )
    return [Ended(job, outcome, error)]


@contextlib.contextmanager
def _stopping(
    slots: Sequence[_Slot], watch: Watch, jobs: Sequence[Job], ended: Sequence[Ended]
) -> Iterator[None]:
    """Whatever ends the comparison, no launch outlives it; an interruption lets runs save first."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as cause:
        running = [slot for slot in slots if slot.launching is not None and slot.job is not None]
        watch.say(f"interrupted: {len(running)} runs are asked to save")
        try:
            _let_save(running)
        finally:
            _end_all(slots)
        raise Preempted(
            f"interrupted with {len(ended)} of {len(jobs)} runs ended",
            expected="a comparison whose runs all ended",
            where="mprecipes compare",
            action="launch the same command again: every run goes on where it was",
        ) from cause
    finally:
        _end_all(slots)


def _let_save(running: Sequence[_Slot]) -> None:
    for slot in running:
        assert slot.launching is not None
        slot.launching.ask_to_stop()
    for slot in running:
        assert slot.launching is not None
        slot.launching.wait(SAVE_SECONDS)


def _end_all(slots: Sequence[_Slot]) -> None:
    for slot in slots:
        if slot.launching is not None:
            slot.launching.end()
