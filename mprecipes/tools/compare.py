# SPDX-License-Identifier: Apache-2.0
"""Compares precision modes: trains every arm with every seed, measures, judges and reports.

On disk, in the folder of the comparison:

    compare.json                 what was asked for; the same command again goes on
    batches.json                 with --batch largest: sequences per device of each arm
    <arm>/seed-<seed>/           a run folder like any other, to be resumed, verified, inspected
    logs/<arm>-seed-<seed>.log   the output of its newest launch
    report.html, report.md, report.json, pictures/

Arms and seeds may be added to a comparison; nothing else about it may change.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from mprecipes.errors import ConfigError
from mprecipes.identity.files import sha256_file, write_json_atomically
from mprecipes.observe.report import Written, write_report
from mprecipes.observe.story import Story
from mprecipes.tools.compare_fit import STEPS, batch_words, largest_batch, sizes_to_try
from mprecipes.tools.compare_launches import Ended, run_jobs
from mprecipes.tools.compare_plan import (
    Job,
    parse_arms,
    parse_seeds,
    plan_jobs,
    read_options,
    spelled,
)
from mprecipes.tools.compare_watch import Watch
from mprecipes.tools.drill_launches import CHECKOUT, accelerate_launcher, make_folder
from mprecipes.tools.report import tell
from mprecipes.tools.run_records import RunRecord, missing_record, read_record

SCHEMA = 1


@dataclass(frozen=True)
class Comparison:
    """What a comparison came to, and where its report lies."""

    runs: list[RunRecord]
    story: Story
    written: Written

    @property
    def is_whole(self) -> bool:
        """Whether every arm has a verdict, be it a bad one."""
        unsure = ("incomplete", "not comparable")
        return not any(judged.word in unsure for judged in self.story.judged)


def run_compare(
    folder: Path,
    *,
    precisions: str,
    seeds: str,
    config: Path | None = None,
    recipe: Path | None = None,
    steps: int | None = None,
    arguments: Sequence[str] = (),
    num_processes: int = 1,
    accelerate_config: Path | None = None,
    devices: Sequence[str] = (),
    timeout: float = 86_400.0,
    console: Console | None = None,
    launcher: Sequence[str] | None = None,
    title: str | None = None,
    batch: Literal["equal", "largest"] = "equal",
) -> Comparison:
    """Trains what has not been trained yet, and reports; blocks for as long as that takes.

    Args:
        folder: of the comparison; new, or of the same one before.
        precisions, seeds: lists with commas; see `compare_plan`.
        config: options of the recipe, the same for all.
        recipe: None for the one whose folder of recipes/configs/ the config is in.
        arguments: options for the recipe, unchanged.
        batch: "equal", as the options say; "largest", that which fits of each arm, at equal memory
            and the same global batch.
        launcher: command line before the recipe; None for `accelerate launch`.

    Raises:
        ConfigError: what is asked for cannot work.
        Preempted: interrupted; the same command goes on.
    """
    recipe, arguments = find_recipe(recipe, config), spelled(arguments)
    arms, numbers = parse_arms(precisions), parse_seeds(seeds)
    folder = folder.resolve()
    jobs, steps = plan_jobs(
        arms, numbers, folder=folder, config=config, arguments=arguments, steps=steps
    )
    launcher = launcher or accelerate_launcher(accelerate_config, num_processes)
    _keep_plan(folder, {
        "schema": SCHEMA,
        "recipe": sha256_file(recipe),
        "config": sha256_file(config) if config else None,
        "steps": steps,
        "arguments": [*arguments],
        "num_processes": num_processes,
        "batch": batch,
    }, {"arms": [arm.name for arm in arms], "seeds": numbers})  # fmt: skip
    go = partial(run_jobs, launcher=launcher, recipe=recipe, logs=folder / "logs", timeout=timeout)
    if batch == "largest":
        sizes = sizes_to_try(read_options(config, arguments), num_processes)
        jobs = _with_largest_batches(jobs, sizes, folder / "batches.json", go, console)
    with Watch(console, jobs, steps, slots=max(1, len(devices))) as watch:
        ended = go(jobs, watch=watch, devices=devices)
    runs = read_runs(jobs, ended, steps)
    story = tell(runs, title)
    return Comparison(runs, story, write_report(story, folder))


def find_recipe(recipe: Path | None, config: Path | None) -> Path:
    """Gives the recipe's file.

    Raises:
        ConfigError: there is none.
    """
    if recipe is None and config is not None:
        recipe = CHECKOUT / "recipes" / f"{config.resolve().parent.name}.py"
    if recipe is None or not recipe.is_file():
        raise ConfigError(
            "no recipe" if recipe is None else "no such file",
            expected="a recipe file, or a config in recipes/configs/<recipe>/",
            where="--recipe" if recipe is None else str(recipe),
            action="write --recipe recipes/pretrain_causal_lm.py",
        )
    return recipe.resolve()


def _keep_plan(folder: Path, fixed: dict[str, Any], open_ended: dict[str, Any]) -> None:
    """Writes what is asked for; what was asked for before must be the same in all but size."""
    file = folder / "compare.json"
    if file.exists():
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            before = {}
        for name, value in fixed.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"{name} is {value}; of this folder's comparison it is {before.get(name)}",
                    expected="the same recipe, config, steps and options: else nothing compares",
                    where=str(file),
                    action="use a new --output_dir, or the options of before",
                )
    make_folder(folder)
    write_json_atomically(file, {**fixed, **open_ended})


def _with_largest_batches(
    jobs: Sequence[Job],
    sizes: Sequence[int],
    file: Path,
    go: Callable[..., list[Ended]],
    console: Console | None,
) -> list[Job]:
    """Gives the jobs with the largest batch of their arm; what was found before is in `file`."""
    known: dict[str, int] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    for job in {job.arm.name: job for job in reversed(jobs)}.values():
        if job.arm.name not in known:
            with Watch(console, [job], STEPS) as watch:
                found = largest_batch(job, sizes, lambda each: go([each], watch=watch)[0])
                watch.say(f"{job.arm.name}: {found} sequences per device fit")
            known[job.arm.name] = found
            write_json_atomically(file, known)
    return [replace(job, words=[*job.words, *batch_words(known[job.arm.name])]) for job in jobs]


def read_runs(jobs: Sequence[Job], ended: Sequence[Ended], steps: int) -> list[RunRecord]:
    """Gives the record of every job, arm by arm; also of one that never got as far as a folder."""
    errors = {each.job.label: each for each in ended}
    records = []
    for job in jobs:
        arm = job.arm
        if (job.run / "run.json").exists():
            records.append(read_record(job.run, arm=arm.name, mode=arm.mode, seed=job.seed))
        else:
            end = errors[job.label]
            records.append(
                missing_record(job.run, arm.name, arm.mode, job.seed, steps, end.outcome, end.error)
            )
    names = list(dict.fromkeys(record.arm for record in records))
    return sorted(records, key=lambda record: (names.index(record.arm), record.seed or 0))
