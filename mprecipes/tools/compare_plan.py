# SPDX-License-Identifier: Apache-2.0
"""What a comparison is going to run: its arms, and one launch per arm and seed.

An arm is a precision mode, or a mode with settings of the option `numerics`:

    fp32   bf16   fp16:scale=1   bf16:keep_in_fp32=norm   fp8:fp8_recipe=tensorwise

`scale` is short for `loss_scale`; a pattern of `keep_in_fp32` without a wildcard holds every module
whose name contains it; several patterns are joined by `+`. A mode named twice is run twice: what
`fp32,fp32` differs by is the noise of the machine.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mprecipes.errors import ConfigError
from mprecipes.identity.values import Refused, check_value, read_argument, read_yaml

MODES = ("fp32", "tf32", "bf16", "fp16", "fp8")
REFERENCE = "fp32"
SHORT = {"scale": "loss_scale"}
LISTS = ("keep_in_fp32", "fp8_skip")
# Bad modes that only a test's own recipe can act out; see tests/planted_recipe.py.
PLANTED = ("grad_accum", "masters", "order")
ALLOW_PLANTED, PLANTED_VARIABLE = "MPRECIPES_ALLOW_PLANTED", "MPRECIPES_PLANTED"
EVALUATIONS = 6  # of the held-out rows, on the way and at the end


@dataclass(frozen=True)
class ArmPlan:
    """One arm: its name as it was written, and what its launches are given."""

    name: str
    mode: str
    numerics: Mapping[str, Any] = field(default_factory=dict)
    planted: str = ""

    @property
    def slug(self) -> str:
        return slug_of(self.name)


@dataclass(frozen=True)
class Job:
    """One run: an arm with a seed, where it goes, and the recipe's command line."""

    arm: ArmPlan
    seed: int
    run: Path
    words: list[str]

    @property
    def label(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def variables(self) -> dict[str, str]:
        return {PLANTED_VARIABLE: self.arm.planted} if self.arm.planted else {}


def slug_of(name: str) -> str:
    """Gives an arm's name as its folder's, which no other arm has.

    A dash stands for a single `:`, `=`, `#` or `*`; where more than that is lost, a digest follows.
    """
    slug = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-")
    if slug == re.sub(r"[:=#*]", "-", name):
        return slug
    return f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def parse_arms(text: str) -> list[ArmPlan]:
    """Gives the arms of `--precisions`, in order.

    Raises:
        ConfigError: an unknown mode or setting, or no FP32 to compare with.
    """
    arms: list[ArmPlan] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        arm = _arm(word)
        same = sum(each.name.split("#")[0] == arm.name for each in arms)
        if same:
            arm = ArmPlan(f"{arm.name}#{same + 1}", arm.mode, arm.numerics, arm.planted)
        if twin := next((each for each in arms if each.slug == arm.slug), None):
            raise _refused(word, f"a folder of its own, not that of {twin.name}", "leave one out")
        arms.append(arm)
    if not any(arm.name == REFERENCE for arm in arms):
        raise ConfigError(
            f"arms {text!r}",
            expected="fp32 among them: every other arm is compared with it",
            where="--precisions",
            action="write, for example, --precisions fp32,bf16",
        )
    return sorted(arms, key=lambda arm: arm.name != REFERENCE)


def _arm(word: str) -> ArmPlan:
    mode, *settings = word.split(":")
    if mode not in MODES:
        raise _refused(word, f"a mode of {', '.join(MODES)}", "correct the mode")
    numerics: dict[str, Any] = {}
    planted = []
    for setting in settings:
        name, has_value, value = setting.partition("=")
        name = SHORT.get(name, name)
        if not (has_value and value and re.fullmatch(r"\w+", name)):
            raise _refused(word, "settings as name=value", f"write {mode}:name=value")
        if name in PLANTED:
            if not os.environ.get(ALLOW_PLANTED):
                raise _refused(word, f"no {name}: it is for tests of this command", "leave it out")
            planted.append(f"{name}={value}")
        elif name in LISTS:
            parts = value.split("+")
            numerics[name] = [p if set(p) & set("*?[") else f"*{p}*" for p in parts]
        else:
            numerics[name] = _value(value)
    return ArmPlan(word, mode, numerics, ",".join(planted))


def _value(text: str) -> Any:
    """Reads a number, true, false, none or a text; YAML would take 1e-7 for a text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False, "none": None}.get(text, text)


def _refused(word: str, expected: str, action: str) -> ConfigError:
    return ConfigError(f"arm {word!r}", expected=expected, where="--precisions", action=action)


def parse_seeds(text: str) -> list[int]:
    """Gives the seeds of `--seeds`, each once.

    Raises:
        ConfigError: something that is not a number from 0, or nothing.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        raise ConfigError(
            f"seeds {text!r}",
            expected="numbers from 0, separated by commas",
            where="--seeds",
            action="write, for example, --seeds 0,1,2; one seed never gives a verdict",
        )
    return list(dict.fromkeys(map(int, words)))


def spelled(arguments: Sequence[str]) -> list[str]:
    """Gives a recipe's arguments with `_` in the names of options, which may be typed with `-`."""
    words = []
    for word in arguments:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            word = "--" + name.removeprefix("--").replace("-", "_") + equals + value
        words.append(word)
    return words


def read_options(config: Path | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Gives what a YAML and the command line say of a recipe's options, the latter as text.

    Raises:
        ConfigError: no such file, or no YAML mapping. The recipe itself checks names and values.
    """
    options: dict[str, Any] = {}
    if config is not None:
        try:
            options |= {name: value for name, (value, _) in read_yaml(config).items()}
        except ConfigError as error:
            raise ConfigError(
                error.found,
                expected="a YAML file of options",
                where=f"--config {error.where}",
                action="name one of recipes/configs/, or correct the file",
            ) from None
    arguments = spelled(arguments)
    for index, word in enumerate(arguments):
        if word.startswith("--"):
            name, has_value, value = word.removeprefix("--").partition("=")
            following = arguments[index + 1] if index + 1 < len(arguments) else "true"
            options[name] = value if has_value else following
    return options


def plan_jobs(
    arms: Sequence[ArmPlan],
    seeds: Sequence[int],
    *,
    folder: Path,
    config: Path | None,
    arguments: Sequence[str],
    steps: int | None,
) -> tuple[list[Job], int]:
    """Gives all runs and the number of steps of each; seed by seed, so that what is compared is
    trained close in time.

    Args:
        arguments: options for the recipe, the same for every run.
        steps: None for `max_steps` of the config.

    Raises:
        ConfigError: an option that the comparison sets itself, or no number of steps.
    """
    arguments = spelled(arguments)
    own = {"precision", "seed", "output_dir", "config"} & {
        word.removeprefix("--").partition("=")[0] for word in arguments if word.startswith("--")
    }
    if own:
        raise ConfigError(
            f"options {', '.join(f'--{name}' for name in sorted(own))} for the recipe",
            expected="none that differs between the runs: a comparison sets these itself",
            where="the options after the command's own",
            action="use --precisions, --seeds, --output_dir and --config of this command",
        )
    options = read_options(config, arguments)
    if steps is None and str(options.get("max_steps", "")).isdigit():
        steps = int(options["max_steps"])
    if steps is None or steps < 1:
        raise ConfigError(
            f"{steps} steps",
            expected="the same number of steps, 1 or more, for every run",
            where="--steps, or max_steps of the config",
            action="write --steps 60",
        )
    common = [*(["--config", str(config)] if config else []), *arguments, "--max_steps", str(steps)]
    if not any(word.partition("=")[0] == "--eval_steps" for word in arguments):
        common += ["--eval_steps", str(evaluate_every(steps))]
    base = _numerics(options.get("numerics"))
    jobs = []
    for seed in seeds:
        for arm in arms:
            run = folder / arm.slug / f"seed-{seed}"
            words = [*common, "--precision", arm.mode, "--seed", str(seed)]
            if arm.numerics:
                words += ["--numerics", json.dumps({**base, **arm.numerics})]
            if arm.mode == "fp8":
                words.append("--allow_unvalidated_fp8")  # to find out is what this is for
            jobs.append(Job(arm, seed, run, [*words, "--output_dir", str(run)]))
    return jobs, steps


def _numerics(value: Any) -> dict[str, Any]:
    """Gives the settings that an arm's own are added to, read as the recipe reads them."""
    kind = dict[str, Any] | None
    try:
        value = read_argument(value, kind) if isinstance(value, str) else value
        return check_value(value, kind) or {}
    except Refused as error:
        raise ConfigError(
            f"numerics is {error.found}",
            expected=error.expected,
            where="--numerics, or numerics of the config",
            action=error.action,
        ) from None


def evaluate_every(steps: int) -> int:
    """Gives the largest divisor of `steps` that makes at least six evaluations, the last included.

    A run is judged by its loss at the last step, so that must be a multiple.
    """
    most = max(1, steps // EVALUATIONS)
    return next(every for every in range(most, 0, -1) if steps % every == 0)
