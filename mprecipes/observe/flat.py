# SPDX-License-Identifier: Apache-2.0
"""Nested facts as the flat config that trackers group and search runs by."""

import json
from collections.abc import Mapping
from typing import Any


def flat_config(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Gives what runs are grouped and found by, from the facts a manifest records.

    `recipe`, `version`, `based_on`, `precision` (the mode as measured), `topology.*`,
    `data_fingerprint` and `git_commit`, before all options under their own names.
    """
    recipe, environment = facts["recipe"], facts["environment"]
    return flatten(
        {
            **facts["config"],
            "recipe": recipe["name"],
            "version": recipe["version"],
            "based_on": recipe["based_on"],
            "recipe_sha256": recipe["sha256"],
            "precision": facts["precision"]["mode"],
            "topology": facts["topology"],
            "data_fingerprint": facts["data"]["fingerprint"],
            "git_commit": environment.get("git_commit"),
        }
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Gives scalars under dotted names; a list becomes its JSON text."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif value is None or isinstance(value, bool | int | float | str):
            flat[f"{prefix}{name}"] = value
        else:
            flat[f"{prefix}{name}"] = json.dumps(value, default=str)
    return flat
