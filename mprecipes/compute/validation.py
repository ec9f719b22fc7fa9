# SPDX-License-Identifier: Apache-2.0
"""FP8 runs only where it was shown to train as well: a validation record per architecture.

A record is one JSON file in `validations/` beside the recipe, written by `mprecipes probe`. Its
name ends with a digest of what it is valid for: the model's architecture without its sizes, the
recipe's name and version, and how FP8 is scaled. A small model vouches for a large one.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from mprecipes.errors import ConfigError
from mprecipes.identity.files import write_json_atomically

FOLDER = "validations"
_NOT_ARCHITECTURE = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def subject(
    model_config: dict[str, Any], *, recipe: str, version: str, fp8_recipe: str
) -> dict[str, Any]:
    """Gives what a record is valid for.

    Args:
        model_config: of the model, as a dict; words and switches are its architecture, numbers are
            its size.
    """
    architecture = {
        name: value
        for name, value in sorted(model_config.items())
        if isinstance(value, str | bool) and name not in _NOT_ARCHITECTURE
    }
    return {
        "architecture": architecture,
        "recipe": recipe,
        "version": version,
        "fp8_recipe": fp8_recipe,
    }


def digest_of(about: dict[str, Any]) -> str:
    """Gives 16 hex digits over a subject."""
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def record_path(folder: Path, about: dict[str, Any]) -> Path:
    """Gives where the record of a subject is kept."""
    return folder / FOLDER / f"fp8-{about['recipe']}-{digest_of(about)}.json"


def write_record(folder: Path, about: dict[str, Any], findings: dict[str, Any]) -> Path:
    """Writes the record of a subject and gives its path.

    Args:
        findings: `passed`, `reason` and the figures behind them; JSON values.
    """
    path = record_path(folder, about)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, {"schema": 1, "subject": about, **findings})
    return path


def require_validation(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Gives the passing record of a subject.

    Raises:
        ConfigError: there is none, or it did not pass, or it is of something else.
    """
    path = record_path(folder, about)
    where = f"{FOLDER}/{path.name} beside the recipe"
    action = (
        "run `mprecipes probe` with this recipe and a small --config of the same architecture, "
        "choose --precision bf16, or add --allow_unvalidated_fp8 for this launch"
    )
    wanted = f"a validation record of {about['recipe']} {about['version']} in which FP8 passed"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            "FP8 was not validated for this architecture, recipe version and fp8_recipe",
            expected=wanted,
            where=where,
            action=action,
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"the record cannot be read ({error})", expected=wanted, where=where, action=action
        ) from None
    if record.get("subject") != about or record.get("passed") is not True:
        reason = record.get("reason", "no reason is given")
        if record.get("subject") != about:
            reason = "it is of something else"
        raise ConfigError(
            f"FP8 did not pass: {reason}", expected=wanted, where=where, action=action
        )
    return record
