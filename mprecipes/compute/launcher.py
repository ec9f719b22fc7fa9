# SPDX-License-Identifier: Apache-2.0
"""What `accelerate launch` was asked for: its command line, config file and exported variables."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from mprecipes.errors import ConfigError

_WITH_VALUE = ("config_file", "num_processes", "mixed_precision", "deepspeed_config_file")
THREADS_VARIABLE = "MPRECIPES_CPU_THREADS"


def asked_by_launcher(default_config_file: str) -> dict[str, Any]:
    """Gives what `accelerate launch` was asked for, read from the parent process's command line.

    Args:
        default_config_file: what `accelerate config` writes: the launcher reads it where it is
            given neither --config_file nor --cpu.

    Returns:
        `origin` (a config file or flag, for messages), `use_cpu` (the elastic launcher reads it and
        does not pass it on) and, where said, `num_processes` and `distributed_type`.

    Raises:
        ConfigError: see `refuse_other_launcher`.
    """
    arguments: list[str] = []
    with suppress(psutil.Error):
        arguments = psutil.Process(os.getppid()).cmdline()
    refuse_other_launcher(arguments)
    is_accelerate = any("accelerate" in Path(argument).name for argument in arguments[:3])
    if not (is_accelerate or "accelerate.commands.launch" in arguments):
        return {"origin": "variables ACCELERATE_...", "use_cpu": False}
    flags = read_flags(arguments)
    asked: dict[str, Any] = {"origin": "accelerate launch", "use_cpu": "cpu" in flags}
    config_file = flags.get("config_file")
    if config_file is None and "cpu" not in flags and Path(default_config_file).is_file():
        config_file = default_config_file
    if config_file is not None:
        asked["origin"] = config_file
        with suppress(OSError, yaml.YAMLError):
            said = yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
            asked["num_processes"] = said.get("num_processes")
            asked["distributed_type"] = said.get("distributed_type")
            asked["use_cpu"] = asked["use_cpu"] or bool(said.get("use_cpu"))
    if "mixed_precision" in flags:
        asked["origin"] = f"--mixed_precision {flags['mixed_precision']}"
    if "num_processes" in flags:
        asked["num_processes"] = int(flags["num_processes"])
    return asked


def refuse_other_launcher(arguments: list[str]) -> None:
    """Refuses DeepSpeed's own launcher, which accelerate hands several machines to by default.

    Measured with accelerate 1.15: without a hostfile each of two machines then trains alone, a run
    of one process, and says nothing.

    Raises:
        ConfigError: with the line that a config must have.
    """
    if "deepspeed.launcher.launch" in arguments:
        raise ConfigError(
            "DeepSpeed's own launcher started this process",
            expected="accelerate's launcher on every machine",
            where="deepspeed_config of the accelerate config",
            action="add `deepspeed_multinode_launcher: standard` there, as accelerate_configs/ do",
        )


def refuse_overrides(accumulation: int, mode: str) -> None:
    """Refuses exported variables by which accelerate or CUDA would overrule the recipe unasked.

    Source: accelerate 1.15, accelerator.py, which prefers its variable to the argument and then
    applies one update in as many steps, and utils/dataclasses.py, which compiles in `prepare`;
    cuBLAS, which knows no TF32 where NVIDIA_TF32_OVERRIDE is 0.

    Args:
        accumulation: forwards of one optimizer step and process.
        mode: the precision mode that runs.

    Raises:
        ConfigError: naming the variable.
    """
    recipe = str(accumulation)
    rules = {  # variable -> may be, what else decides
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
            lambda value: value in (recipe, "auto"),
            f"gradient_accumulation_steps, {recipe} by the recipe",
        ),
        "ACCELERATE_DYNAMO_BACKEND": (
            lambda value: value.lower() == "no",
            "torch_compile of the recipe, which its checkpoints record",
        ),
        "ACCELERATE_FP8_BACKEND": (
            lambda value: value.upper() in ("AO", "NO") or mode != "fp8",
            "fp8_recipe of the option numerics; FP8 runs through torchao alone (docs/precision.md)",
        ),
        "NVIDIA_TF32_OVERRIDE": (
            lambda value: value != "0" or mode != "tf32",
            "precision, tf32 by the recipe",
        ),
    }
    for variable, (is_harmless, owner) in rules.items():
        value = os.environ.get(variable)
        if value and not is_harmless(value):
            raise ConfigError(
                f"{variable} is {value}",
                expected=f"{owner}; the variable would overrule it without a word",
                where="environment of this launch",
                action=f"unset {variable}, or take its setting out of the accelerate config",
            )


def cpu_threads(local_processes: int) -> int:
    """Gives how many threads this process computes with: its share of the cores, or as asked.

    Raises:
        ConfigError: the variable MPRECIPES_CPU_THREADS is no number of threads.
    """
    asked = os.environ.get(THREADS_VARIABLE, "")
    if asked and not (asked.isascii() and asked.isdigit() and int(asked) > 0):
        raise ConfigError(
            f"{THREADS_VARIABLE} is {asked}",
            expected="a whole number from 1, threads of each process",
            where="environment of this launch",
            action=f"correct it, or unset it for cores / processes ({os.cpu_count()} cores here)",
        )
    return int(asked) if asked else max(1, (os.cpu_count() or 1) // local_processes)


def read_flags(arguments: list[str]) -> dict[str, str]:
    """Reads `--name value` and `--name=value`; the script's own options come after the script."""
    flags: dict[str, str] = {}
    position = 1
    while position < len(arguments):
        name, has_value, value = arguments[position].partition("=")
        if name.startswith("--"):
            key = name.removeprefix("--").replace("-", "_")
            if not has_value and key in _WITH_VALUE:
                position += 1
                value = arguments[position] if position < len(arguments) else ""
            flags.setdefault(key, value)
        elif name.endswith(".py") and position > 2:
            break
        position += 1
    return flags


def is_set(variable: str) -> bool:
    """Whether the launcher exported `true` or `1` under this name."""
    return os.environ.get(variable, "false").lower() in ("true", "1")


def deepspeed_file(asked_origin: str) -> tuple[dict[str, Any], str]:
    """Gives the DeepSpeed settings that the accelerate config points to, and their place.

    A relative path is looked for from the working directory, then from the parent of the accelerate
    config's folder, so that `ds_configs/zero2.json` is found from anywhere.

    Raises:
        ConfigError: there are none, or they are not a JSON object.
    """
    said = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    places = [Path(said), Path(asked_origin).resolve().parent.parent / said]
    for place in places if said != "none" else ():
        if place.is_file():
            try:
                values = json.loads(place.read_text(encoding="utf-8"))
            except ValueError as error:
                raise _unreadable(f"not JSON ({error})", str(place)) from error
            if isinstance(values, dict):
                return values, str(place)
            raise _unreadable("not an object", str(place))
    found = "no deepspeed_config_file" if said == "none" else f"{said}, which is not there"
    raise _unreadable(found, asked_origin)


def _unreadable(found: str, where: str) -> ConfigError:
    return ConfigError(
        found,
        expected="a DeepSpeed config of this repository, or a copy of one",
        where=where,
        action="set deepspeed_config.deepspeed_config_file to a file like ds_configs/zero2.json",
    )
