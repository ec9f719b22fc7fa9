# SPDX-License-Identifier: Apache-2.0
"""Option values: read from YAML and command-line words, checked against a type, written as YAML.

YAML 1.1 guesses: PyYAML reads `2e-5` as text, `no` as False, `010` as 8 and `1:30` as 90. Here an
unquoted word is a number, true, false or null only where every reader agrees; a word that is read
differently by different readers stays `Ambiguous` and is refused wherever its meaning matters.
"""

import difflib
import json
import math
import os
import re
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml

from mprecipes.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:e[-+]?[0-9]+)?|\.[0-9]+(?:e[-+]?[0-9]+)?"
    r"|[0-9][0-9_]*e[-+]?[0-9]+|\.inf|\.nan)",
    re.IGNORECASE,
)
_AMBIGUOUS = {  # what the word looks like -> what to type when it is not meant as text
    r"(?i:yes|no|on|off)": "write true or false",
    r"(?i:none)": "write null",
    r"[-+]?0[0-9_]+": "drop the leading zero (YAML reads it as octal)",
    r"[-+]?0[ob][0-9_]+": "write the number in decimal",
    r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?": "write one number (YAML reads base 60)",
    r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt ].*)?": "write one number (YAML reads a date)",
}
_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}
_NAMES = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}


class Refused(ValueError):
    """A value that is not what its option takes; the caller knows where it came from."""

    def __init__(self, found: str, expected: str, action: str) -> None:
        self.found, self.expected, self.action = found, expected, action
        super().__init__(found)


@dataclass(frozen=True)
class Ambiguous:
    """An unquoted word that readers of YAML disagree about."""

    text: str

    def __repr__(self) -> str:
        return f"{self.text} (an unquoted word)"


def read_word(text: str) -> Any:
    """Gives what an unquoted word means: None, bool, int, float, str or `Ambiguous`."""
    if text in ("", "~") or text.lower() == "null":
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INT.fullmatch(text) and len(text) < 100:
        return int(text.replace("_", ""), 0)
    if any(re.fullmatch(pattern, text) for pattern in _AMBIGUOUS):
        return Ambiguous(text)
    if _FLOAT.fullmatch(text):
        text = text.lower().replace("_", "")
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    return text


def read_json(text: str) -> Any:
    """Gives the value of a JSON text; a name given twice, NaN and infinity are refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"{sorted(twice)[0]!r} given twice")
        return dict(pairs)

    def not_finite(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a finite number")

    return json.loads(text, object_pairs_hook=unique, parse_constant=not_finite)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with `read_word` in place of YAML 1.1's guesses."""

    yaml_implicit_resolvers = {None: [("!word", re.compile(""))]}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, str):
                message = f"the name {key_node.value!r} is not text; put it in quotes"
                raise yaml.MarkedYAMLError(problem=message, problem_mark=key_node.start_mark)
            if key in first:
                message = f"{key!r} given twice, first on line {first[key]}"
                raise yaml.MarkedYAMLError(problem=message, problem_mark=key_node.start_mark)
            first[key] = line
        return super().construct_mapping(node, deep=deep)


_Loader.add_constructor("!word", lambda loader, node: read_word(node.value))


def read_yaml(path: str | Path) -> dict[str, tuple[Any, int]]:
    """Gives option -> (value, line) of a YAML file that holds one mapping; an empty file gives {}.

    Raises:
        ConfigError: the file is unreadable, not YAML, not a mapping, or names an option twice.
    """
    line: int | None = None
    try:
        loader = _Loader(Path(path).read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ValueError(f"found {root.value!r:.60} in place of `option: value` lines")
        values = loader.construct_document(root)
        lines = [key.start_mark.line + 1 for key, _ in root.value]
        return {name: (values[name], line) for name, line in zip(values, lines, strict=True)}
    except OSError as error:
        found = f"the file cannot be read ({error.strerror})"
    except yaml.MarkedYAMLError as error:
        found = error.problem or "not YAML"
        line = error.problem_mark.line + 1 if error.problem_mark else None
    except (ValueError, yaml.YAMLError) as error:
        found = str(error).splitlines()[0]
    raise ConfigError(
        found,
        expected="a UTF-8 YAML file of `option: value` lines, each option once",
        where=f"{path}:{line}" if line else str(path),
        action="correct that line" if line else "check the path after --config, and the file",
    ) from None


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """Gives the valid name that was most likely meant: close in spelling, initials, or a part."""
    valid, wanted = list(names), name.lower().replace("-", "_")
    if close := difflib.get_close_matches(wanted, valid, n=1, cutoff=0.7):
        return close[0]
    for candidate in valid:  # lr -> learning_rate
        if wanted == "".join(part[0] for part in candidate.split("_") if part):
            return candidate
    parts = [candidate for candidate in valid if len(wanted) > 3 and wanted in candidate]
    loose = difflib.get_close_matches(wanted, valid, n=1, cutoff=0.55)
    return min(parts, key=len) if parts else loose[0] if loose else None


def split_optional(kind: Any) -> tuple[Any, bool]:
    """Gives the type without `| None`, and whether None is allowed."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    members = [member for member in get_args(kind) if member is not type(None)]
    assert len(members) == 1, f"{kind}: an option has one type, or one type and None"
    return members[0], True


def describe_type(kind: Any) -> str:
    """Gives a type in words, as error messages and the help show it."""
    base, optional = split_optional(kind)
    origin = get_origin(base) or base
    if origin is Literal:
        text = "one of " + ", ".join(map(str, get_args(base)))
    elif origin is list:
        text = f"a list, each {describe_type(get_args(base)[0])}"
    elif origin is dict:
        text = "a mapping (JSON text on the command line)"
    else:
        assert origin in _NAMES, f"{kind}: not a type an option can have"
        text = _NAMES[origin]
    return text + (" or none" if optional else "")


def read_argument(words: str | list[str], kind: Any) -> Any:
    """Gives the value of what was typed after a flag, ready for `check_value`; `none` is None."""
    base, _ = split_optional(kind)
    origin, members = get_origin(base) or base, get_args(base)
    if origin is list and isinstance(words, list):
        if [word.lower() for word in words] in (["none"], ["null"]):
            return None
        return [read_argument(word, members[0]) for word in words]
    assert isinstance(words, str)
    if words.lower() in ("none", "null") and not (origin is Literal and words in members):
        return None
    if origin is dict:
        try:
            return read_json(words)
        except ValueError as error:
            found = f"{words} ({error})"
            raise Refused(found, describe_type(kind), "write a JSON object") from None
    return words if origin in (str, Literal) else read_word(words)


def check_value(value: Any, kind: Any) -> Any:
    """Gives the value as its option's type; only int -> float and words of one meaning change.

    A text that begins with `~/` is a path from the home folder, which no shell writes out in a YAML
    file or after `--name=`; it would be a folder called `~` here.

    Raises:
        Refused: another type, not finite, beyond 64 bits, or ambiguous.
    """
    base, optional = split_optional(kind)
    origin, members = get_origin(base) or base, get_args(base)
    if isinstance(value, Ambiguous):
        word = value.text.lower()
        if word == "none" and origin is Literal and value.text in members:
            return value.text
        if word == "none" and optional:
            return None
        if word in _SWITCHES and base is bool:
            return _SWITCHES[word]
    elif value is None:
        if optional:
            return None
    elif origin is Literal:
        if any(value == member and type(value) is type(member) for member in members):
            return value
    elif origin is list:
        if isinstance(value, list):
            return [check_value(item, members[0]) for item in value]
    elif origin is dict:
        if isinstance(value, dict):
            return _check_free(value)
    elif base is float:
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
    elif base is int:
        if type(value) is int and -(2**63) <= value < 2**63:
            return value
    elif type(value) is base:
        is_at_home = base is str and value.startswith("~/")
        return os.path.expanduser(value) if is_at_home else value
    raise Refused(_show(value), describe_type(kind), _advice(value, base))


def _check_free(value: Any) -> Any:
    """Gives a value inside a mapping after refusing what no reader could be sure of."""
    if isinstance(value, dict):
        return {name: _check_free(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_check_free(item) for item in value]
    if isinstance(value, Ambiguous) or (isinstance(value, float) and not math.isfinite(value)):
        raise Refused(_show(value), "a value that every reader reads alike", _advice(value, Any))
    if value is not None and type(value) not in (bool, int, float, str):
        expected = "text, numbers, true, false, null, lists and mappings"
        raise Refused(_show(value), expected, "write one of these")
    return value


def _show(value: Any) -> str:
    names = {bool: "true/false", int: "whole number", float: "number", str: "text", list: "list"}
    if value is None:
        return "none"
    if isinstance(value, Ambiguous):
        return repr(value)
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return f"{text:.80} ({names.get(type(value), 'mapping')})"


def _advice(value: Any, base: Any) -> str:
    if get_origin(base) is Literal:
        word = value.text if isinstance(value, Ambiguous) else str(value)
        if word in get_args(base):
            return "put it in quotes"
        near = difflib.get_close_matches(word.lower(), get_args(base), n=1, cutoff=0.6)
        return f"write {near[0] if near else describe_type(base)}"
    if isinstance(value, Ambiguous):
        advice = next(say for like, say in _AMBIGUOUS.items() if re.fullmatch(like, value.text))
        return (
            advice if base in (bool, int, float) else f"put it in quotes if it is text, or {advice}"
        )
    if base is str and isinstance(value, bool | int | float):
        return "put the value in quotes if it is meant as text"
    if base is int and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if base in (int, float, bool) and isinstance(value, str) and type(read_word(value)) is base:
        return "remove the quotes"
    if get_origin(base) is list and not isinstance(value, list | dict):
        return f"write [{value}]"
    return "write " + ("a finite number" if base is Any else describe_type(base))


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper that quotes whatever `read_word` would not read back as this text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = read_word(text) == text and "\n" not in text
    return dumper.represent_scalar(f"{_TAG}str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def write_yaml(value: Any) -> str:
    """Gives a value as one line of YAML that any reader reads back equal."""
    style: dict[str, Any] = {"default_flow_style": True, "width": math.inf, "allow_unicode": True}
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, **style)
    return text.removesuffix("...\n").strip()
