# SPDX-License-Identifier: Apache-2.0
"""Launches that several cases look at: runs of FIX-64 left alone, and killed again and again.

48 steps of 4 rows, 3 epochs of 16 steps, dropout on. CUTS are steps inside epoch 0 and epoch 1, and
around the end of an epoch; at each the process is killed, and a new one goes on from there.
"""

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fix64 import MODEL, RECIPE, SPY, options, write_rows
from tests.launching import Launched, launch, start
from tests.wandb_reading import segments

CUTS = (5, 15, 16, 17, 21, 32)
NUM_STEPS = 48


class Watched(NamedTuple):
    """A run folder, and per launch the rows of every optimizer step as the model was given them."""

    path: Path
    rows: list[list[list[int]]]

    @property
    def all_rows(self) -> list[list[int]]:
        return [step for launched in self.rows for step in launched]


def watch(folder: Path, data: Path, *, faults=(), processes=(), accumulation=1, **changes):
    """Launches the recipe once per planted fault and once more to the end; gives what was seen.

    Args:
        processes: number of processes of each launch, 1 where it is left out.
        accumulation: micro-batches a step and process, or a list with one number per launch.
        changes: options of the recipe.
    """
    run, rows, planted = folder / "run", [], (*faults, None)
    numbers = [*processes] or [1] * len(planted)
    per_step = [accumulation] * len(planted) if isinstance(accumulation, int) else accumulation
    for number, (fault, count, size) in enumerate(zip(planted, numbers, per_step, strict=True)):
        spied = folder / f"rows-{number}.jsonl"
        env = {"SPY_FILE": str(spied)}
        env |= {"MPRECIPES_FAULT": fault} if fault else {}
        words = [RECIPE, *options(data, run, **changes)]
        done = launch(SPY, words, env=env, num_processes=count)
        assert (done.returncode == 0) == (fault is None), done.output
        rows.append(_steps(spied, count, size))
    return Watched(run, rows)


def _steps(spied: Path, num_processes: int, size: int) -> list[list[int]]:
    """Gives the rows of every optimizer step, over all ranks and micro-batches."""
    lines = [json.loads(line) for line in spied.read_text().splitlines()]
    by_rank = [[x["rows"] for x in lines if x["rank"] == r] for r in range(num_processes)]
    assert len({len(batches) for batches in by_rank}) == 1
    return [
        [row for batches in by_rank for batch in batches[i : i + size] for row in batch]
        for i in range(0, len(by_rank[0]), size)
    ]


@pytest.fixture(scope="session")
def fix64(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("fix64") / "rows.jsonl")


THREE_EPOCHS = {"max_steps": NUM_STEPS, "save_steps": 1, "keep_last": NUM_STEPS}
TWELVE_STEPS = {"max_steps": 12, "save_steps": 3, "keep_last": 3}


@pytest.fixture(scope="session")
def reference(tmp_path_factory, fix64):
    """The run that was never interrupted."""
    return watch(tmp_path_factory.mktemp("reference"), fix64, **THREE_EPOCHS)


@pytest.fixture(scope="session")
def cut_run(tmp_path_factory, fix64):
    """The same run in seven processes, six of them killed with SIGKILL after a step of CUTS."""
    faults = [f"kill@step:{step}" for step in CUTS]
    return watch(tmp_path_factory.mktemp("cut"), fix64, faults=faults, **THREE_EPOCHS)


@pytest.fixture(scope="session")
def whole(tmp_path_factory, fix64):
    """The path of a run of TWELVE_STEPS that was never interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = go_on(fix64, run)
    assert done.returncode == 0, done.output
    return run


class Stopped(NamedTuple):
    """A run that was killed and then moved: where it is now, and where it was trained."""

    path: Path
    trained_at: Path


@pytest.fixture(scope="session")
def stopped(tmp_path_factory, fix64):
    """The same run killed after step 9, with checkpoints of 3, 6 and 9, and moved; copy it."""
    run = tmp_path_factory.mktemp("stopped") / "machine-one"
    done = go_on(fix64, run, env={"MPRECIPES_FAULT": "kill@step:9"})
    assert done.returncode != 0, done.output
    return Stopped(Path(shutil.move(run, run.with_name("machine-two"))), run)


@pytest.fixture
def copied(tmp_path):
    """Gives a function that copies a stopped run into the test's own folder and gives the path."""
    return lambda stopped: Path(shutil.copytree(stopped.path, tmp_path / "run"))


def go_on(data: Path, run: Path, *, env=None, **changes: Any) -> Launched:
    """Launches a run of TWELVE_STEPS, the first time or again."""
    return launch(RECIPE, options(data, run, **{**TWELVE_STEPS, **changes}), env=env)


@pytest.fixture(scope="session")
def cosine_cut(tmp_path_factory, fix64):
    """20 steps of accumulation 4, cosine, peak 1e-3, warm-up 4, killed at 10 and resumed."""
    run = tmp_path_factory.mktemp("cosine") / "run"
    words = options(
        fix64, run, max_steps=20, warmup_steps=4, gradient_accumulation_steps=4,
        per_device_train_batch_size=1,
    )  # fmt: skip
    assert launch(RECIPE, words, env={"MPRECIPES_FAULT": "kill@step:10"}).returncode != 0
    done = launch(RECIPE, words)
    assert done.returncode == 0, done.output
    return run


class FromBf16(NamedTuple):
    """A BF16 model folder, and the path of a run that went on training it."""

    folder: Path
    run: Path


@pytest.fixture(scope="session")
def from_bf16(tmp_path_factory, fix64):
    """50 steps of BF16 training that began from a model stored in BF16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    home = tmp_path_factory.mktemp("bf16")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    model.bfloat16().save_pretrained(home / "model")
    words = options(
        fix64, home / "run", model_config=None, model_name_or_path=home / "model", max_steps=50,
        save_steps=50, logging_steps=1, learning_rate=1e-4, precision="bf16",
    )  # fmt: skip
    done = launch(RECIPE, words)
    assert done.returncode == 0, done.output
    return FromBf16(home / "model", home / "run")


TO_WANDB = {"watch": json.dumps({"report_to": ["wandb"]}), "logging_steps": 1, "precision": "fp32"}


@pytest.fixture(scope="session")
def tracked_cut(tmp_path_factory, fix64):
    """The path of a run with W&B offline, saved every 50 steps: killed twice, and then preempted.

    Each process is cut when it has logged at least 30 steps to the file of W&B.
    """
    run = tmp_path_factory.mktemp("tracked") / "run"
    words = options(fix64, run, max_steps=100_000, save_steps=50, **TO_WANDB)
    for number, cut in enumerate((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM), start=1):
        with start(RECIPE, words) as running:
            running.wait_until(partial(_has_logged, run, number))
            os.kill(running.workers()[0].pid, cut)
            done = running.finish()
        assert done.returncode != 0, done.output
    return run


def _has_logged(run: Path, number: int) -> bool:
    files = segments(run)
    # Each row is in the file as history and as summary.
    return len(files) == number and files[-1].read_bytes().count(b"train/loss") >= 60


class Spied(NamedTuple):
    """A run folder, and the file with what `tests/spy_recipe.py` saw."""

    path: Path
    spied: Path


@pytest.fixture(scope="session")
def tracked_two(tmp_path_factory, fix64):
    """4 steps on two processes with W&B offline, every micro-batch's loss recorded on its own."""
    folder = tmp_path_factory.mktemp("tracked-two")
    words = options(fix64, folder / "run", max_steps=4, save_steps=2, **TO_WANDB)
    spied = folder / "rows.jsonl"
    done = launch(SPY, [RECIPE, *words], env={"SPY_FILE": str(spied)}, num_processes=2)
    assert done.returncode == 0, done.output
    return Spied(folder / "run", spied)
