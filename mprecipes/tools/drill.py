# SPDX-License-Identifier: Apache-2.0
"""Runs a recipe three times in real processes and says whether being killed changed anything.

(A) uninterrupted into FOLDER/reference; (B) into FOLDER/interrupted, killed with SIGKILL, as often
as asked; (C) the same command again until it finishes. Then everything both runs wrote down and
kept is compared, without tolerance. On disk afterwards: both run folders, one log per launch,
`drill.json`, `drill.png`. The recipe may be any file that writes such run folders, also a copy
outside the repository.
"""

import random
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mprecipes.checkpoint.manifest import read_manifest
from mprecipes.errors import ConfigError
from mprecipes.identity.files import write_json_atomically
from mprecipes.identity.recipe import identify, read_recipe
from mprecipes.resume.journal import read_journals
from mprecipes.tools import processes
from mprecipes.tools.drill_compare import Row, compare_runs
from mprecipes.tools.drill_launches import Launches, accelerate_launcher, make_folder
from mprecipes.tools.drill_report import Picture, Watch, draw
from mprecipes.tools.verify import newest_checkpoint

SAVE_POINT = "save.before_publish"


@dataclass(frozen=True)
class Kill:
    """One kill, and where the next attempt went on from.

    Attributes:
        step: the last step the killed attempt journaled.
        during: "step", or "save" when it died inside the save due at that step.
        resumed_from: step of the checkpoint the next attempt started from; 0 for none.
    """

    attempt: int
    step: int
    during: str
    resumed_from: int


@dataclass(frozen=True)
class DrillResult:
    """What a drill found; `equal` only if every row is."""

    recipe: str
    status: str
    sha256: str
    precision: str
    num_processes: int
    arguments: list[str]
    last_step: int
    kill_seed: int | None
    kills: list[Kill]
    rows: list[Row]
    seconds: dict[str, float]
    folder: Path

    @property
    def equal(self) -> bool:
        return all(row.equal for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(row), "equal": row.equal} for row in self.rows]
        own = {**asdict(self), "rows": rows, "folder": str(self.folder)}
        return {"schema": 1, "equal": self.equal, **own}


def run_drill(
    recipe: Path,
    folder: Path,
    *,
    arguments: Sequence[str] = (),
    kill_at_steps: Sequence[int] = (),
    kill_during: str = "step",
    kill_seed: int | None = None,
    num_processes: int = 1,
    accelerate_config: Path | None = None,
    timeout: float = 1800.0,
    watch: Watch | None = None,
    launcher: Sequence[str] | None = None,
) -> DrillResult:
    """Runs, kills, resumes and compares one recipe; blocks for three trainings.

    Args:
        recipe: the recipe file.
        folder: where everything goes; may exist, but holds no earlier drill.
        arguments: options for the recipe, unchanged; `--output_dir` is the drill's own.
        kill_at_steps: steps at whose end every rank is killed, one launch each; empty for one
            random step in the middle half of the run, drawn with `kill_seed` (drawn when None).
        kill_during: "step", or "save" to kill in the first save at or after each of those steps.
        accelerate_config: None for this checkout's cpu.yaml, or ddp.yaml where there is a GPU.
        timeout: seconds for each launch.
        watch: shows progress; None shows nothing.
        launcher: command line before the recipe; None for `accelerate launch` with the two above.

    Raises:
        ConfigError: options that cannot work, or a recipe that fails by itself.
        RecipeError: the resumed run failed, or a run took too long.
    """
    _check(recipe, folder, kill_at_steps)
    folder = folder.resolve()
    make_folder(folder)
    identity = identify(read_recipe(recipe), recipe)
    watch = watch or Watch(None)
    if launcher is None:
        launcher = accelerate_launcher(accelerate_config, num_processes)
    launches = Launches([*launcher, str(recipe.resolve()), *arguments], folder, timeout, watch)
    with processes.unwind_on_terminate():
        last_step = launches.reference()
        watch.expect(last_step)
        if not kill_at_steps:
            kill_seed = secrets.randbelow(2**31) if kill_seed is None else kill_seed
            middle = random.Random(kill_seed).randint(last_step // 4, last_step * 3 // 4)
            kill_at_steps = [max(1, middle)]
            watch.say(f"kill step {kill_at_steps[0]}, drawn with --kill_seed {kill_seed}")
        else:
            kill_seed = None
        steps, point = [*kill_at_steps], "step"
        if max(steps) > last_step:
            raise _beyond(max(steps), last_step)
        if kill_during == "save":
            steps, point = [_save_step(launches, step, last_step) for step in steps], SAVE_POINT
        attempts = [launches.killed(i, step, point) for i, step in enumerate(steps, start=1)]
        launches.resumed()
    run = folder / "interrupted"
    history = read_journals(run / "journal").records
    kills = [
        Kill(attempt, step, kill_during, _first_step(history, attempt + 1, last_step) - 1)
        for attempt, step in zip(attempts, steps, strict=True)
    ]
    reference = folder / "reference"
    newest = newest_checkpoint(reference)
    assert newest is not None
    result = DrillResult(
        recipe=f"{identity.name}@{identity.version}",
        status=identity.status,
        sha256=identity.sha256,
        precision=precision_name(read_manifest(newest).raw["precision"]),
        num_processes=num_processes,
        arguments=[*arguments],
        last_step=last_step,
        kill_seed=kill_seed,
        kills=kills,
        rows=compare_runs(reference, run),
        seconds=launches.seconds,
        folder=folder,
    )
    write_json_atomically(folder / "drill.json", result.to_dict())
    draw(
        folder / "drill.png",
        Picture.of(result, read_journals(reference / "journal").records, history),
    )
    return result


def precision_name(precision: dict[str, Any] | None) -> str:
    return str((precision or {}).get("mode", "unknown precision"))


def _first_step(history: dict[int, list[Any]], attempt: int, last_step: int) -> int:
    """Gives the first step an attempt took, one past the last when there was nothing left to do."""
    records = history.get(attempt)
    return records[0].step if records else last_step + 1


def _save_step(launches: Launches, step: int, last_step: int) -> int:
    """Gives the first step at or after `step` at which the run saves."""
    newest = newest_checkpoint(launches.folder / "reference")
    assert newest is not None
    config = read_manifest(newest).config or {}
    if "save_steps" not in config:
        raise ConfigError(
            "a recipe whose config has no save_steps",
            expected="an option save_steps, from which the next save after a step follows",
            where="--kill_during save",
            action="name the option save_steps in the recipe, or use --kill_during step",
        )
    every = config["save_steps"] or last_step
    return min(-(-step // every) * every, last_step)


def _beyond(step: int, last_step: int) -> ConfigError:
    return ConfigError(
        f"step {step}, in a run of {last_step} steps",
        expected=f"a step from 1 to {last_step}",
        where="--kill_at_step",
        action="lower it, or raise --max_steps",
    )


def _check(recipe: Path, folder: Path, kill_at_steps: Sequence[int]) -> None:
    if not recipe.is_file():
        raise ConfigError(
            "a folder" if recipe.is_dir() else "no such file",
            expected="a recipe file, before any option of the recipe",
            where=str(recipe),
            action="write: mprecipes drill RECIPE.py --output_dir FOLDER [options of the recipe]",
        )
    for step in kill_at_steps:
        if step < 1:
            raise ConfigError(
                f"step {step}",
                expected="a step of 1 or more",
                where="--kill_at_step",
                action="name a step the run reaches",
            )
    for name in ("reference", "interrupted"):
        if (folder / name).exists():
            raise ConfigError(
                f"{name}/ of an earlier drill",
                expected="a folder without one, so that nothing is compared with a stale run",
                where=f"--output_dir {folder}",
                action="name a new folder, or remove this one",
            )
