# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at random times, again and again, into runs that save beside the training: `make soak`.

Of SOAK_KILLS kills SOAK_RECIPES hit real launches of the recipe, the others a toy that trains and
saves in real processes (a third of them pairs, of which one or both die); every kill is followed by
a real resume. SOAK_SECONDS bound it, SOAK_SEED repeats its choices. Exit code 1 at any loss: a byte
that does not verify, a good checkpoint fewer, a published step that is gone, or other bits than
those of a training that nobody killed.
"""

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from mprecipes.checkpoint.digests import state_digests
from mprecipes.checkpoint.manifest import Manifest, read_manifest, verify_folder
from mprecipes.checkpoint.snapshot import live_tensors
from tests import fix64
from tests.launching import launch, start
from tests.reading import assert_same_run, attempt_lines
from tests.save_server import run_jobs
from tests.toys import toy, train_step

KEEP = 2
SURVIVOR_SECONDS = 10.0


class Loss(AssertionError):
    """Something is gone or wrong after a kill."""


class Record:
    """What a run's folder held after each kill, and what every kill cost.

    Attributes:
        lost: per kill, the steps that were trained and have to be trained again.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.lost: list[int] = []
        self.steps: list[int] = []

    def after_kill(self, trained: int, published: int = 0) -> Manifest | None:
        """Judges the disk; gives the newest checkpoint.

        Args:
            trained: the last step that was.
            published: the newest step that a process had been told is safe.

        Raises:
            Loss: see above.
        """
        folders = [path for path in self.run.glob("*/[!.]*") if (path / "manifest.json").exists()]
        here = [path for path in folders if path.parent.name == "checkpoints"]
        found = {path.name: verify_folder(path) for path in folders}
        if bad := {name: list(map(str, each)) for name, each in found.items() if each}:
            raise Loss(f"does not verify: {bad}")
        manifests = sorted((read_manifest(path) for path in here), key=lambda each: each.step)
        steps = [manifest.step for manifest in manifests]
        if len(steps) < min(KEEP, len(self.steps)):
            raise Loss(f"checkpoints of steps {self.steps} before, {steps} after")
        if max([0, *steps]) < max([published, *self.steps]):
            raise Loss(f"{steps} are left; {self.steps} were there, {published} was published")
        self.steps = steps
        self.lost.append(trained - max([0, *steps]))
        return manifests[-1] if manifests else None


class Truth:
    """State digests of the toy after each step, trained here without any interruption."""

    def __init__(self) -> None:
        self._model, self._optimizer = toy()
        self._digests = [{}]

    def __getitem__(self, step: int) -> dict[str, str]:
        while len(self._digests) <= step:
            train_step(self._model, self._optimizer, len(self._digests))
            self._digests.append(state_digests(live_tensors(self._model, self._optimizer)))
        return self._digests[step]


def check_ends(results: list[dict]) -> None:
    """Fails unless the ranks that were to die did so by the signal.

    Of two, which die one after the other, the second may have seen the loss of the first, and end.

    Raises:
        Loss: none was killed, or one ended as if nothing had happened.
    """
    by_signal = [result["status"] == -signal.SIGKILL for result in results]
    if not any(by_signal) or any(result["status"] == 0 for result in results):
        raise Loss(f"ended by itself: {results}")


class ToyRun:
    """The toy on one or two ranks, killed and resumed."""

    def __init__(self, home: Path, count: int, truth: Truth) -> None:
        self.run, self.count, self.truth = home / "run", count, truth
        self.record = Record(self.run)
        policy = {"mirror": f"file://{home}/mirror", "keep_best": "eval/loss"}
        self.job = {"action": "launch", "run": self.run, "policy": policy, "every": 3}
        self.job |= {"world_size": count, "wait": False}

    def kill(self, draws: random.Random) -> str:
        """Launches, kills one rank or all after a random time, judges."""
        seconds = draws.uniform(0.02, 0.8)
        dead = [[0], [1], [0, 1]][draws.randrange(3)] if self.count == 2 else [0]
        jobs = [{**self.job, "rank": rank, "until": 10**9} for rank in range(self.count)]
        for rank, job in enumerate(jobs):  # a survivor gets as little time as a launcher gives it
            job["kill_after"] = seconds if rank in dead else seconds + SURVIVOR_SECONDS
        before = len(self._notes())
        results = run_jobs(*jobs)
        notes = self._notes()
        check_ends([results[rank] for rank in dead])
        resumed = [step for what, step in notes[before:] if what == "resumed"]
        if resumed not in ([], [max([0, *self.record.steps])]):
            raise Loss(f"resumed from {resumed}, {self.record.steps} were there")
        trained = [step for what, step in notes[before:] if what == "trained"]
        last = max([0, *self.record.steps, *trained[-1:]])
        published = max([0, *(step for what, step in notes if what == "published")])
        newest = self.record.after_kill(last, published)
        if newest is not None and newest.state_digests != self.truth[newest.step]:
            raise Loss(f"step {newest.step} is not what an uninterrupted training has")
        who = "both ranks" if len(dead) == 2 else f"rank {dead[0]} of {self.count}"
        return f"toy, {who} after {seconds:.3f} s, at step {last}"

    def finish(self) -> None:
        """Goes on undisturbed for a while, and ends with the right bits and nothing left over."""
        until = max([0, *self.record.steps]) + 6
        jobs = [{**self.job, "rank": rank, "until": until} for rank in range(self.count)]
        for result in run_jobs(*jobs):
            if result.get("value", {}).get("digests") != self.truth[until]:
                raise Loss(f"the end is not that of an uninterrupted training: {result}")
        if left := [path.name for path in self.run.rglob(".*")]:
            raise Loss(f"left over: {left}")

    def _notes(self) -> list[tuple[str, int]]:
        path = self.run / "trained-0.txt"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(what, int(step)) for what, step in map(str.split, lines)]


class RecipeRun:
    """The recipe under its launcher, saving beside the training every 5 steps."""

    def __init__(self, home: Path) -> None:
        self.home, self.run, self.attempt = home, home / "run", 0
        self.record = Record(self.run)
        self.data = fix64.write_rows(home / "rows.jsonl")

    def words(self, run: Path) -> list[str]:
        return fix64.options(
            self.data, run, max_steps=5000, per_device_train_batch_size=2, keep_last=KEEP,
            checkpoint=json.dumps({"mirror": f"file://{self.home}/mirror"}),
        )  # fmt: skip

    def kill(self, draws: random.Random) -> str:
        """Launches, kills a rank, the launcher or everything after a random time, judges."""
        journal = self.run / "journal" / f"attempt-{self.attempt:04d}.jsonl"
        with start(fix64.RECIPE, self.words(self.run), num_processes=2) as running:
            running.wait_until(lambda: journal.exists() and journal.stat().st_size > 0)
            seconds = draws.uniform(0.0, 1.0)
            until = time.monotonic() + seconds
            running.wait_until(lambda: time.monotonic() >= until)
            workers = running.workers()
            victims = {f"rank {rank} of 2": [process] for rank, process in workers.items()}
            victims["the launcher"] = [psutil.Process(running.process.pid)]
            victims["everything"] = running.processes()
            who = draws.choice(sorted(victims))
            for process in victims[who]:
                process.kill()
            running.finish()
            if psutil.wait_procs(list(workers.values()), timeout=60)[1]:
                raise Loss(f"a process goes on: {running.output()}")
        trained = max([0, *self.record.steps, *(x["step"] for x in self._lines())])
        self.attempt += 1
        self.record.after_kill(trained)
        return f"recipe, {who} {seconds:.3f} s after its first step, at step {trained}"

    def finish(self) -> None:
        """Goes on to a step at which a run that nobody killed is stopped too, and compares."""
        at = {"MPRECIPES_FAULT": f"terminate@step:{max([0, *self.record.steps]) + 12}"}
        for run in (self.run, self.home / "whole"):
            done = launch(fix64.RECIPE, self.words(run), num_processes=2, env=at)
            outcome = json.loads((run / "run.json").read_text())["attempts"][-1]["outcome"]
            if outcome != "preempted":
                raise Loss(f"{run.name} ended as {outcome}:\n{done.output}")
        assert_same_run(self.run, self.home / "whole")

    def _lines(self) -> list[dict]:
        path = self.run / "journal" / f"attempt-{self.attempt:04d}.jsonl"
        return attempt_lines(self.run, self.attempt) if path.exists() else []


def soak(home: Path, num_kills: int, num_recipes: int, seconds: float, seed: int) -> int:
    """Gives the exit code; prints a line per kill and a summary."""
    os.environ["MPRECIPES_CACHE"] = str(home / "cache")
    draws, deadline, truth = random.Random(seed), time.monotonic() + seconds, Truth()
    runs = {name: home / name for name in ("one", "two", "recipe")}
    for path in runs.values():
        path.mkdir(parents=True)
    one, two = ToyRun(runs["one"], 1, truth), ToyRun(runs["two"], 2, truth)
    recipe = RecipeRun(runs["recipe"])
    toys = [two if number % 3 == 2 else one for number in range(num_kills - num_recipes)]
    planned = [*toys, *[recipe] * num_recipes]
    draws.shuffle(planned)
    print(f"soak: {num_kills} kills in at most {seconds:.0f} s, SOAK_SEED={seed}", flush=True)
    done: list[int] = []
    try:
        for number, target in enumerate(planned, start=1):
            if time.monotonic() > deadline:
                print(f"soak: {seconds:.0f} s are over after {number - 1} kills", flush=True)
                break
            what = target.kill(draws)
            done.append(target.record.lost[-1])
            print(f"kill {number:3d}: {what}, {done[-1]} steps lost", flush=True)
        for target in dict.fromkeys(planned[: len(done)]):
            target.finish()
    except AssertionError as error:  # ours, and those of the tests' own readers
        print(f"soak: LOSS at kill {len(done) + 1} with SOAK_SEED={seed}: {error}", flush=True)
        return 1
    hit = sum(target is recipe for target in planned[: len(done)])
    print(
        f"soak: {len(done)} kills survived ({hit} of the recipe), nothing lost but "
        f"{sum(done)} steps in all; per kill: median {statistics.median(done or [0]):g}, "
        f"at most {max(done, default=0)}",
        flush=True,
    )
    return 0


def main() -> None:
    kills = int(os.environ.get("SOAK_KILLS") or 100)
    recipes = int(os.environ.get("SOAK_RECIPES") or min(10, kills))
    seconds = float(os.environ.get("SOAK_SECONDS") or 1800)
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(1 << 32))
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as home:
        sys.exit(soak(Path(home), kills, recipes, seconds, seed))


if __name__ == "__main__":
    main()
