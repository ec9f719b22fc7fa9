# SPDX-License-Identifier: Apache-2.0
"""The three kinds of launch a drill makes, and whether each ended as it should have.

A kill counts only when it is seen to be one: a return code that is not 0, a journal that ends at
the very step asked for, and a `run.json` in which the attempt never came to say how it ended.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mprecipes.errors import ConfigError, RecipeError
from mprecipes.identity.history import read_run
from mprecipes.resume.journal import read_journals
from mprecipes.tools import processes
from mprecipes.tools.drill_report import Watch
from mprecipes.tools.verify import newest_checkpoint

CHECKOUT = Path(__file__).resolve().parents[2]


def make_folder(folder: Path) -> None:
    """Makes the folder after `--output_dir`, unless it is there.

    Raises:
        ConfigError: it is a file, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"no folder can be made here ({error.strerror})",
            expected="a folder, or a path where one can be made",
            where=f"--output_dir {folder}",
            action="name another --output_dir, or correct its permissions or free space",
        ) from error


class Launches:
    """One drill's launches, made alike: only the folder and the planted fault differ.

    Attributes:
        seconds: wall time of each launch so far, by name.
    """

    def __init__(self, command: Sequence[str], folder: Path, timeout: float, watch: Watch) -> None:
        self.command, self.folder = [*command], folder
        self.timeout, self.watch = timeout, watch
        self.seconds: dict[str, float] = {}

    def launch(self, name: str, run: Path, fault: str | None = None) -> int:
        """Runs one launch and gives its return code.

        Raises:
            RecipeError: the time limit ended it.
        """
        with self.watch.following(name, run):
            outcome = processes.launch(
                [*self.command, "--output_dir", str(run)],
                journal=run / "journal",
                log=self.log(name),
                fault=fault,
                timeout=self.timeout,
                on_record=self.watch.record,
            )
        self.seconds[name] = round(outcome.seconds, 2)
        if outcome.returncode is None:
            raise RecipeError(
                f"the {name} run was still going after {self.timeout:g} s and was ended",
                expected="a run that ends within --timeout seconds",
                where=str(self.log(name)),
                action=f"raise --timeout or lower --max_steps; its last output:\n{self.tail(name)}",
            )
        return outcome.returncode

    def log(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '-')}.log"

    def tail(self, name: str) -> str:
        return processes.tail(self.log(name))

    def reference(self) -> int:
        """Runs A and gives its last step.

        Raises:
            ConfigError: the recipe fails by itself, or writes no run a drill could compare.
        """
        run = self.folder / "reference"
        code = self.launch("reference", run)
        steps = steps_of(run, 0)
        if code != 0 or not steps or newest_checkpoint(run) is None:
            raise ConfigError(
                f"exit code {code}, {len(steps)} journaled steps, newest checkpoint "
                f"{newest_checkpoint(run)}",
                expected="a recipe that finishes when nothing interrupts it, keeping a journal and "
                "a checkpoint at its last step",
                where=f"the uninterrupted run, {shlex.join(self.command)}",
                action=f"run it by itself first; the end of {self.log('reference')}:\n"
                f"{self.tail('reference')}",
            )
        return steps[-1]

    def killed(self, number: int, step: int, point: str) -> int:
        """Runs B until its planted kill at `step`, and gives the attempt that died.

        Raises:
            ConfigError: the run finished, or died of something else.
        """
        run, name = self.folder / "interrupted", f"killed {number}" if number > 1 else "killed"
        attempts = len(attempts_of(run))
        code = self.launch(name, run, fault=f"kill@{point}:{step}")
        last = steps_of(run, attempts)[-1:]
        entry = attempts_of(run)[-1] if len(attempts_of(run)) == attempts + 1 else {}
        silent = entry.get("outcome") == "killed" or "failed_rank" in entry  # rank 0 said nothing
        if code == 0 or not silent or last != [step]:
            raise ConfigError(
                f"exit code {code}, last journaled step {last[0] if last else None}, outcome "
                f"{entry.get('outcome', 'none: nothing started')}",
                expected=f"a run cut off by SIGKILL: not 0, step {step}, outcome killed",
                where=f"--kill_at_step {step}, fault point {point!r}",
                action="choose a step after the one it resumes from, and see that its loop calls "
                f"fault_point('step', step) at each step boundary; the end of {self.log(name)}:\n"
                f"{self.tail(name)}",
            )
        return attempts

    def resumed(self) -> None:
        """Runs C until it finishes.

        Raises:
            RecipeError: it does not; what a drill is there to find.
        """
        if code := self.launch("resumed", self.folder / "interrupted"):
            raise RecipeError(
                f"the resumed run ended with exit code {code}",
                expected="the same command to continue the killed run until its last step",
                where=f"the resumed run in {self.folder / 'interrupted'}",
                action=f"read the end of {self.log('resumed')}:\n{self.tail('resumed')}",
            )


def attempts_of(run: Path) -> list[dict[str, Any]]:
    """Gives the entries of `run.json`; none before a run has written it."""
    return read_run(run).attempts if (run / "run.json").exists() else []


def steps_of(run: Path, attempt: int) -> list[int]:
    """Gives the steps one attempt of a run journaled; empty when it did not get that far."""
    return [record.step for record in read_journals(run / "journal").records.get(attempt, [])]


def accelerate_launcher(config: Path | None, num_processes: int) -> list[str]:
    """Gives the command line before the recipe.

    Args:
        config: an accelerate config; None for this checkout's cpu.yaml, or ddp.yaml with a GPU.

    Raises:
        ConfigError: no such file.
    """
    if config is None:
        import torch

        name = "ddp.yaml" if torch.cuda.is_available() else "cpu.yaml"
        config = CHECKOUT / "accelerate_configs" / name
    if not config.is_file():
        raise ConfigError(
            "no such file",
            expected="an accelerate config that starts the elastic launcher",
            where=f"--accelerate_config {config}",
            action="name one of the repository's accelerate_configs/",
        )
    return [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config),
        "--num_processes", str(num_processes), "--main_process_port", "0",
    ]  # fmt: skip
