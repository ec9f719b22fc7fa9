# SPDX-License-Identifier: Apache-2.0
"""Real processes for tests of saves, forked from one that has only imported: milliseconds each.

    (result,) = run_jobs({"run": tmp_path, "action": "train", "steps": [1, 2]})

Jobs of one call run at the same time. `env` may plant a fault (mprecipes/faults.py); `world_size`
above 1 makes peers of them, in DDP with `ddp`; with `local_rank` the first of each node writes on a
disk of its own; after `kill_after` seconds a job is killed. A result: {"status": exit status,
negative for a signal, "value": what the action gave, "error": {"kind", "found"} when it raised}.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer imports it, seconds in every child
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mprecipes.checkpoint.digests import state_digests
from mprecipes.checkpoint.manifest import verify_folder
from mprecipes.checkpoint.policy import policy_of
from mprecipes.checkpoint.snapshot import live_tensors
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import RecipeError
from mprecipes.observe.metrics import MetricsLog
from tests.toys import FACTS, Run, train_step

NOBODY = 65534


def run_jobs(*jobs: dict) -> list[dict]:
    """Runs the jobs and waits for all of them; called by tests."""
    process = _server()
    process.stdin.write(json.dumps([{**job, "run": str(job["run"])} for job in jobs]) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@functools.cache
def _server() -> subprocess.Popen:
    """Started by the first call, ended with the tests."""
    command = [sys.executable, __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes)
    atexit.register(process.communicate)
    return process


def make_run(job: dict) -> Run:
    """Joins the job's peers, if it has any, and gives the toy run."""
    rank, world_size = job.get("rank", 0), job.get("world_size", 1)
    if world_size > 1:
        store = f"file://{job['store']}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    group = dist.group.WORLD if world_size > 1 else None
    limit = job.get("timeout", 600)
    local_rank = job.get("local_rank", rank)
    ranks = Ranks(rank, world_size, local_rank, world_size, group, timeout_seconds=limit)
    if "local_rank" in job:
        ranks = ranks.with_node_writers()
    keep_last = job.get("keep_last", 2)
    policy = policy_of(job.get("policy"), keep_last=keep_last)
    run = Run(Path(job["run"]), ranks=ranks, policy=policy, **job.get("sizes", {}))
    if job.get("ddp"):
        wrapped = torch.nn.parallel.DistributedDataParallel(run.model, find_unused_parameters=True)
        run.model = run.manager.model = wrapped
    return run


def train(job: dict) -> dict:
    """Trains and saves steps; a save that fails is told and the next step goes on.

    `limits` by step, before it: {"file_bytes": largest file this process may write, None for any}
    or {"mode": permissions of checkpoints/}; the latter binds root too, which acts as nobody.
    """
    run = make_run(job)
    errors, rank_bytes = [], []
    for step in job["steps"]:
        set_limits(run, **job.get("limits", {}).get(str(step), {}))
        try:
            run.train([step])
            rank_bytes.append(run.manager.last_save.rank_bytes)
        except RecipeError as error:
            errors.append({"kind": type(error).__name__, "found": error.found, "step": step})
    return {"errors": errors, "rank_bytes": rank_bytes, "candidates": run.manager.candidates()}


def set_limits(run: Run, file_bytes: int | None = -1, mode: int = -1) -> None:
    if file_bytes != -1:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (hard if file_bytes is None else file_bytes, hard)
        )
    if mode != -1:
        if os.getuid() == 0:
            os.seteuid(0)
            os.chown(run.folder.checkpoints, NOBODY, -1)
            os.seteuid(NOBODY)
        with contextlib.suppress(PermissionError):  # another rank's; it does the same
            run.folder.checkpoints.chmod(mode)


def resume(job: dict) -> dict:
    """Does what a launch does: sweep, find, restore; then verifies everything that is there."""
    run = make_run(job)
    run.manager.sweep()
    manifest = run.manager.newest_trusted()
    state = run.manager.restore(manifest)
    digests = state_digests(live_tensors(run.model, run.optimizer))
    checkpoints = run.folder.checkpoints
    report = {
        "step": manifest.step,
        "state": state,
        "digests_agree": digests == manifest.state_digests,
        "problems": [str(p) for name in run.names() for p in verify_folder(checkpoints / name)],
        "names": run.names(),
        "refused": [refusal.name for refusal in run.manager.refusals],
    }
    run.train(job.get("steps", []))
    report["digests"] = state_digests(live_tensors(run.model, run.optimizer))
    report["candidates"] = run.manager.candidates()
    return report


def launch(job: dict) -> dict:
    """Does all that a recipe does with checkpoints, up to step `until`; saves each `every` steps.

    Each line of `trained-<rank>.txt` is written when that is so: "resumed 3", "trained 4",
    "published 4".
    """
    run = make_run(job)
    folder, manager, rank = Path(job["run"]), run.manager, job.get("rank", 0)
    folder.mkdir(parents=True, exist_ok=True)
    metrics = MetricsLog(folder / "metrics.jsonl", enabled=rank == 0, attempt=0)
    with open(folder / f"trained-{rank}.txt", "ab", buffering=0) as file, manager:

        def note(what: str, step: int) -> None:
            file.write(f"{what} {step}\n".encode())

        manager.sweep()
        manifest, state = manager.restore_newest(lambda _: None)
        start = manifest.step if manifest else 0
        assert manifest is None or state == {"draws": start}
        first = state_digests(live_tensors(run.model, run.optimizer))
        note("resumed", start)
        for step in range(start + 1, job["until"] + 1):
            manager.wants_save(step)
            train_step(run.model, run.optimizer, step)
            note("trained", step)
            loss = {"eval/loss": 1.0 / step}
            metrics.log(step, loss)
            if step % job.get("every", 1) == 0:
                manager.save(
                    run.position(step),
                    facts=FACTS,
                    rank_state={"draws": step},
                    milestone="four" if step == 4 else None,
                    metrics=loss,
                    wait=job.get("wait", True),
                )
            for report in manager.finished():
                assert report.error is None
                note("published", report.step)
    refused = [refusal.name for refusal in manager.refusals]
    return {
        "step": start,
        "first": first,
        "refused": refused,
        "digests": state_digests(live_tensors(run.model, run.optimizer)),
    }


def storm(job: dict) -> dict:
    """Saves every step, or none; tells the memory that took beyond the state, and what there is."""
    run = make_run(job)
    run.train(job["steps"][:1], save=False)
    state_bytes = sum(t.nbytes for t in live_tensors(run.model, run.optimizer).values())
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Source: proc(5), resets VmHWM
    run.train(job["steps"][1:], save=job["save"], wait=False)
    run.manager.wait()
    reports = run.manager.finished()
    return {
        "state_bytes": state_bytes,
        "extra_bytes": memory("VmHWM") - before,
        "saved": [report.step for report in reports if report.error is None],
        "waited": sum(report.waited_seconds > 0.001 for report in reports),
        "counts": dict(run.manager.counts),
        "digests": state_digests(live_tensors(run.model, run.optimizer)),
    }


def remember(job: dict) -> dict:
    """Trains, restored first or not; tells its memory afterwards, and after more restores."""
    run = make_run(job)
    if job["restore"]:
        run.manager.restore_newest(lambda _: None)
    run.train(job["steps"], save=False)
    report = {
        "state_bytes": sum(t.nbytes for t in live_tensors(run.model, run.optimizer).values()),
        "resident": held(),
        "peak": memory("VmHWM"),
        "after_restores": [],
    }
    for _ in range(job.get("more", 0)):
        run.manager.restore_newest(lambda _: None)
        run.train(job["steps"], save=False)
        report["after_restores"].append(held())
    return report


def held() -> int:
    """Bytes this process holds; what its allocator keeps for later is 30 MB of mere chance."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory("VmRSS")


def memory(field: str) -> int:
    """Bytes of this process, `VmRSS` or `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])


ACTIONS = {
    "train": train, "resume": resume, "launch": launch, "storm": storm, "remember": remember,
}  # fmt: skip


def start(job: dict, result: Path) -> int:
    """Forks the job; the child writes its result and skips all clean-up of the parent's."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.update(job.get("env", {}), RANK=str(job.get("rank", 0)))
        try:
            value = ACTIONS[job["action"]](job)
        finally:
            os.seteuid(os.getuid())
        result.write_text(json.dumps({"value": value}))
        status = 0
    except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
        found = getattr(error, "found", repr(error))
        result.write_text(json.dumps({"error": {"kind": type(error).__name__, "found": found}}))
    finally:
        os._exit(status)


def wait_for(pid: int, job: dict, began: float) -> int:
    """Gives the exit status of a child, which is killed when its time is over."""
    while "kill_after" in job:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - began >= job["kill_after"]:
            os.kill(pid, signal.SIGKILL)  # not reaped yet: the pid is still its own
            break
        time.sleep(0.001)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            jobs = json.loads(line)
            files = [Path(folder) / str(number) for number in range(len(jobs))]
            extra = {"store": str(Path(folder) / "store")}
            pids = [start(job | extra, file) for job, file in zip(jobs, files, strict=True)]
            began = time.monotonic()
            order = sorted(range(len(jobs)), key=lambda n: jobs[n].get("kill_after", math.inf))
            ended = {n: wait_for(pids[n], jobs[n], began) for n in order}
            statuses = [ended[n] for n in range(len(jobs))]
            results = [
                {"status": status} | (json.loads(file.read_text()) if file.exists() else {})
                for status, file in zip(statuses, files, strict=True)
            ]
            print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
