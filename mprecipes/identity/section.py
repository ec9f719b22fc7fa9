# SPDX-License-Identifier: Apache-2.0
"""A section of a config: a mapping option that is read into a dataclass as strictly as options."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from mprecipes.errors import ConfigError
from mprecipes.identity.values import Refused, check_value, nearest_name, split_optional

S = TypeVar("S")


def read_section(
    cls: type[S], values: Mapping[str, Any] | None, option: str, **own_options: Any
) -> S:
    """Gives the dataclass of a mapping as it stands under an option; None is all defaults.

    A field that is a tuple takes a list.

    Args:
        own_options: fields that are options of their own, which the mapping may not set.

    Raises:
        ConfigError: an unknown name, or a value that is not what its name takes.
    """
    kinds = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    names = [name for name in names if name not in own_options]
    checked = dict(own_options)
    for name, value in (values or {}).items():
        if name in own_options:
            raise ConfigError(
                f"{name} is set in {option}",
                expected=f"the option {name}",
                where=f"option {name}",
                action=f"write {name} as an option of its own (--{name})",
            )
        if name not in names:
            meant = nearest_name(name, names)
            raise ConfigError(
                f"unknown name {name}",
                expected=meant or "one of " + ", ".join(names),
                where=f"option {option}",
                action=f"write {meant}, or remove it" if meant else "remove it",
            )
        kind, is_tuple = _as_option(kinds[name])
        try:
            found = check_value(value, kind)
        except Refused as error:
            raise ConfigError(
                f"{name} is {error.found}",
                expected=error.expected,
                where=f"{name} in option {option}",
                action=error.action,
            ) from None
        checked[name] = tuple(found) if is_tuple and found is not None else found
    return cls(**checked)


def _as_option(kind: Any) -> tuple[Any, bool]:
    """Gives the type that an option has, and whether the field is a tuple: of a list, then."""
    base, optional = split_optional(kind)
    if typing.get_origin(base) is not tuple:
        return kind, False
    listed = types.GenericAlias(list, typing.get_args(base)[:1])
    return (listed | None if optional else listed), True
