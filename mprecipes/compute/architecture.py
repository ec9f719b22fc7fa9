# SPDX-License-Identifier: Apache-2.0
"""A new model's config from the fields a recipe was given, none of them ignored."""

import difflib
import inspect
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from mprecipes.errors import ConfigError


def new_model_config(fields: dict[str, Any] | None) -> PretrainedConfig:
    """Gives the transformers config of `model_type` with these fields.

    transformers keeps a field it does not know as an attribute that nothing reads; here a typing
    error is refused.

    Args:
        fields: `model_type` and fields of that type's config.

    Raises:
        ConfigError: no or an unknown `model_type`, an unknown field, or a value that is refused.
    """
    kinds = list(CONFIG_MAPPING.keys())
    kind_name = (fields or {}).get("model_type")
    if not fields or kind_name not in kinds:
        found = "no model_type" if fields else "no model_config and no model_name_or_path"
        expected = "a model_type of transformers" if fields else "one of the two"
        if kind_name is not None:
            near = difflib.get_close_matches(str(kind_name), kinds, n=1, cutoff=0.0)[0]
            found, expected = f"model_type {kind_name!r}", f"{expected}; the nearest is {near!r}"
        raise ConfigError(
            found,
            expected=expected,
            where="model_config",
            action="give `model_config: {model_type: llama, ...}` in the YAML of --config, or "
            "--model_name_or_path FOLDER",
        )
    kind = CONFIG_MAPPING[kind_name]
    known = {*inspect.signature(kind.__init__).parameters, *kind().to_dict(), "model_type"}
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{name!r} is no field of a {kind_name} config",
                expected=f"a field of {kind.__name__}; the nearest is {near!r}",
                where=f"model_config.{name}",
                action=f"write {near}, or leave it out",
            )
    try:
        return kind(**{name: value for name, value in fields.items() if name != "model_type"})
    except Exception as error:
        raise ConfigError(
            f"{type(error).__name__}: {error}",
            expected=f"values that {kind.__name__} accepts",
            where="model_config",
            action="correct the field it names",
        ) from error
