# SPDX-License-Identifier: Apache-2.0
"""A recipe's config: one flat dataclass, read from its defaults, a YAML file and the command line.

Precedence: dataclass < `--config file.yaml` < command line. Every value is checked after the merge,
wherever it came from, and refused with the option, the value found, what was expected, the file and
line it came from and the next action. Nothing is guessed (see `values`) and nothing unknown is
ignored. Derived values are never written back into the config.
"""

import copy
import dataclasses
import os
import sys
import typing
from argparse import SUPPRESS, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from mprecipes.errors import ConfigError
from mprecipes.identity.values import (
    Refused,
    check_value,
    describe_type,
    nearest_name,
    read_argument,
    read_yaml,
    split_optional,
    write_yaml,
)

REQUIRED: Any = dataclasses.MISSING
DEFAULT, COMMAND_LINE = "default", "command line"
_FLAGS = ("config", "accept", "resume_from", "allow_unvalidated_fp8", "dry_run", "help")

C = TypeVar("C")


def option(
    default: Any = REQUIRED,
    *,
    help: str,
    resume: Literal["must_match", "may_change", "free"] = "may_change",
    choices: Iterable[Any] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Gives the dataclass field of one option of a recipe's `Config`.

    Args:
        default: the value when nothing else gives one; without it the option is required.
        help: what the option does, in one sentence with its unit.
        resume: whether a resumed run may have another value: never, with
            `--accept changed_<option>`, or freely (the change is logged).
        choices: the only values allowed (each item, for a list); None for no such limit.
        minimum: smallest value allowed (each item, for a list).
        maximum: largest value allowed (each item, for a list).
    """
    assert resume in ("must_match", "may_change", "free"), resume
    facts = {
        "help": help,
        "resume": resume,
        "choices": None if choices is None else tuple(choices),
        "minimum": minimum,
        "maximum": maximum,
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=facts)
    return dataclasses.field(default=default, metadata=facts)


class Origins(dict[str, str]):
    """For each option where its value came from: "default", a YAML's path, or "command line".

    Attributes:
        accepted: the names after `--accept`: what may differ at this launch, no setting of the run.
        resume_from: the step after `--resume_from`; None goes on from the newest checkpoint.
        allow_unvalidated_fp8: this launch may compute in FP8 without a validation record.
        dry_run: this launch ends in `end_dry_run`.
    """

    accepted: tuple[str, ...] = ()
    resume_from: int | None = None
    allow_unvalidated_fp8: bool = False
    dry_run: bool = False


def parse_config(cls: type[C], argv: list[str] | None = None) -> tuple[C, Origins]:
    """Gives the resolved config, and for each option where its value came from.

    Every recipe also takes `--config`, `--accept`, `--resume_from`, `--allow_unvalidated_fp8`,
    `--dry_run` (see `end_dry_run`) and `--help`, which prints and exits 0.

    Args:
        cls: the recipe's `@dataclass(kw_only=True)` made of `option()` fields.
        argv: the words after the program's name; None for those this process was started with.

    Raises:
        ConfigError: an unknown or missing option, or a value that is not what its option takes.
    """
    kinds = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    assert not fields.keys() & set(_FLAGS), "these flags are every recipe's"
    typed = _parse_words(cls, kinds, sys.argv[1:] if argv is None else argv)
    files, resume_from = typed.pop("config", []), typed.pop("resume_from", None)
    if len(files) > 1:
        raise ConfigError(
            f"--config {' and '.join(files)}",
            expected="one file: files are not merged",
            where="command line",
            action="put all options into one file, or some after the command as --option VALUE",
        )
    path = files[0] if files else ""

    values: dict[str, Any] = {}
    origins, places = Origins(dict.fromkeys(fields, DEFAULT)), {}
    origins.accepted = tuple(typed.pop("accept", ()))
    origins.dry_run = typed.pop("dry_run", False)
    if resume_from is not None:
        with _refusals_at("--resume_from on the command line", "resume_from", "--"):
            origins.resume_from = check_value(read_argument(resume_from, int), int)
            _check_limits(origins.resume_from, {"choices": None, "minimum": 0, "maximum": None})
    origins.allow_unvalidated_fp8 = typed.pop("allow_unvalidated_fp8", False)
    for name, field in fields.items():
        places[name] = f"the default of {name} in {cls.__name__}"
        if field.default is not dataclasses.MISSING:
            values[name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[name] = field.default_factory()
    for name, (value, line) in (read_yaml(path) if path else {}).items():
        if name not in fields:
            _refuse_unknown(name, fields, where=f"{path}:{line}", prefix="")
        values[name], origins[name], places[name] = value, str(path), f"{name} in {path}:{line}"
    for name, words in typed.items():
        origins[name], places[name] = COMMAND_LINE, f"--{name} on the command line"
        with _refusals_at(places[name], name, "--"):
            values[name] = read_argument(words, kinds[name])

    for name, field in fields.items():
        if name not in values:
            raise ConfigError(
                f"{name} is not set",
                expected=f"{describe_type(kinds[name])}: {field.metadata['help']}",
                where=f"option {name}" + (f" (not in {path} either)" if path else ""),
                action=f"add --{name} VALUE, or a line `{name}: VALUE` in the YAML after --config",
            )
        with _refusals_at(places[name], name, "--" if origins[name] == COMMAND_LINE else ""):
            values[name] = check_value(values[name], kinds[name])
            _check_limits(values[name], field.metadata)
    return cls(**values), origins


def end_dry_run(config: Any, origins: Origins) -> None:
    """Prints, on rank 0, the config as YAML that `--config` takes, and exits 0; after `--dry_run`.

    `start` calls it when all has been refused that can be before anything is started.
    """
    if origins.dry_run:
        if os.environ.get("RANK", "0") == "0":
            print("# the resolved config; nothing was started")
            print(render_config(config_to_dict(config), origins), end="")
        raise SystemExit(0)


def resume_classes(cls: type) -> dict[str, str]:
    """Gives option -> "must_match", "may_change" or "free"."""
    return {field.name: field.metadata["resume"] for field in dataclasses.fields(cls)}


def config_to_dict(config: Any) -> dict[str, Any]:
    """Gives the config as JSON-safe values in the order of its fields."""
    return dataclasses.asdict(config)


def dump_yaml(config: Any) -> str:
    """Gives the config as YAML, one option a line, that `parse_config` reads back equal."""
    return render_config(config_to_dict(config))


def render_config(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> str:
    """Gives option -> value as YAML, one a line, each with its origin as a comment when known."""
    lines = {name: f"{name}: {write_yaml(value)}" for name, value in values.items()}
    if origins is None:
        return "".join(f"{line}\n" for line in lines.values())
    width = min(48, max(map(len, lines.values()), default=0))
    return "".join(f"{line:<{width}}  # {origins[name]}\n" for name, line in lines.items())


class _refusals_at:
    """Turns a `Refused` value into a ConfigError that says where the value stands."""

    def __init__(self, where: str, name: str, prefix: str) -> None:
        self.where, self.name, self.prefix = where, name, prefix

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Refused):
            raise ConfigError(
                f"{self.name} is {error.found}",
                expected=error.expected,
                where=self.where,
                action=f"{self.prefix}{self.name}: {error.action}",
            ) from None


def _check_limits(value: Any, facts: Mapping[str, Any]) -> None:
    choices, minimum, maximum = facts["choices"], facts["minimum"], facts["maximum"]
    for item in value if isinstance(value, list) else [value]:
        if item is None:
            continue
        if choices is not None and item not in choices:
            expected = "one of " + ", ".join(map(str, choices))
            meant = nearest_name(str(item), map(str, choices))
            raise Refused(repr(item), expected, f"write {meant or choices[0]}")
        if minimum is not None and item < minimum:
            raise Refused(repr(item), _limits(minimum, maximum), f"write {minimum} or more")
        if maximum is not None and item > maximum:
            raise Refused(repr(item), _limits(minimum, maximum), f"write {maximum} or less")


def _limits(minimum: float | None, maximum: float | None) -> str:
    if minimum is not None and maximum is not None:
        return f"{minimum} to {maximum}"
    return f"at least {minimum}" if maximum is None else f"at most {maximum}"


def _refuse_unknown(name: str, names: Iterable[str], *, where: str, prefix: str) -> NoReturn:
    meant = nearest_name(name, names)
    raise ConfigError(
        f"unknown option {prefix}{name}",
        expected=f"{prefix}{meant}" if meant else "one of " + ", ".join(names),
        where=where,
        action=f"write {prefix}{meant}, or remove it" if meant else "remove it, or see --help",
    )


def _parse_words(cls: Any, kinds: Mapping[str, Any], argv: list[str]) -> dict[str, Any]:
    """Gives the options typed, each with its words as text.

    HfArgumentParser is given a twin of the config whose fields are all text, so that one set of
    rules (`values`) judges YAML and command line. Source: transformers 5.24, hf_argparser.py
    (metadata is passed to `add_argument`; both --a_b and --a-b are made).
    """
    from transformers.hf_argparser import HfArgumentParser  # slow: seconds, needed only here

    class Parser(HfArgumentParser):
        def add_argument(self, *args: Any, **kwargs: Any) -> Any:
            action = super().add_argument(*args, **kwargs)
            if len(action.option_strings) > 1 and action.dest != "help":
                action.option_strings = action.option_strings[:1]  # the help shows one spelling
            return action

        def error(self, message: str) -> NoReturn:
            raise ConfigError(
                message,
                expected="--option VALUE; a value that begins with a minus as --option=VALUE",
                where="command line",
                action="correct it; --help lists every option",
            )

    twin = [_as_text(field, kinds[field.name]) for field in dataclasses.fields(cls)]
    parser = Parser(
        dataclasses.make_dataclass("Options", twin, kw_only=True),  # type: ignore[arg-type]
        usage="%(prog)s [--config FILE.yaml] [--dry_run] [--option VALUE ...]",
        description=getattr(sys.modules.get(cls.__module__), "__doc__", None),
        formatter_class=partial(RawDescriptionHelpFormatter, max_help_position=30, width=100),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", action="append", default=SUPPRESS,
        help="YAML of options; the command line wins",
    )  # fmt: skip
    parser.add_argument(
        "--dry_run", "--dry-run", action="store_true", default=SUPPRESS,
        help="print the resolved config and where each value came from, then exit",
    )  # fmt: skip
    parser.add_argument(
        "--accept", action="extend", nargs="+", metavar="CHANGE", default=SUPPRESS,
        help="changes allowed at this resume, as a refusal names them: changed_learning_rate ...",
    )  # fmt: skip
    parser.add_argument(
        "--resume_from", "--resume-from", metavar="STEP", default=SUPPRESS,
        help="go on from the checkpoint or milestone of this step; later ones are set aside",
    )  # fmt: skip
    parser.add_argument(
        "--allow_unvalidated_fp8", "--allow-unvalidated-fp8",
        action="store_true", default=SUPPRESS,
        help="compute in FP8 at this launch without a validation record of `mprecipes probe`",
    )  # fmt: skip
    for name, kind in kinds.items():
        if split_optional(kind)[0] is bool:
            parser.add_argument(
                f"--no_{name}", f"--no-{name.replace('_', '-')}", dest=name, action="store_const",
                const="false", default=SUPPRESS, help=SUPPRESS,
            )  # fmt: skip
    typed, unknown = parser.parse_known_args(argv)
    for word in unknown:
        flag = word.partition("=")[0]
        if flag.startswith("--"):
            names = [*kinds, *_FLAGS]
            _refuse_unknown(flag[2:], names, where="command line", prefix="--")
        parser.error(f"{word!r} belongs to no option")
    return vars(typed)


def _as_text(field: dataclasses.Field, kind: Any) -> tuple[str, type, Any]:
    """Gives the twin of an option: same flag and help, its value text, absent unless typed."""
    base, _ = split_optional(kind)
    origin = get_origin(base) or base
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    shown = "required" if default is dataclasses.MISSING else f"default: {write_yaml(default)}"
    if default is None:
        shown = "default: none"
    facts: dict[str, Any] = {"help": f"{field.metadata['help']} ({shown})".replace("%", "%%")}
    choices = field.metadata["choices"] or (get_args(base) if origin is Literal else ())
    words = {int: "INT", float: "FLOAT", str: "TEXT", dict: "JSON", bool: "true|false"}
    facts["metavar"] = "{" + ",".join(map(str, choices)) + "}"
    if not choices:
        facts["metavar"] = words.get(origin, "VALUE")
    if origin is bool:
        facts.update(nargs="?", const="true")
    elif origin is list:
        facts.update(action="extend", nargs="*")  # given again, it adds
    return field.name, str, dataclasses.field(default=SUPPRESS, metadata=facts)
