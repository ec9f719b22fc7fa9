# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint keeps beside its tensors so that, alone, it becomes a Hugging Face folder.

On disk: `pretrained.json`, a file of the checkpoint like any other: `schema`, `architecture` (the
model's class in transformers), `texts` and `binaries` (files by name; base64), and `ancestry`: what
the weights began from, nearest first. No absolute path. Of adapters it is all this of their base,
and `adapter_config.json` among the texts.
"""

import base64
import copy
import json
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from mprecipes.checkpoint.adapter_file import CONFIG
from mprecipes.checkpoint.card import lineage_of
from mprecipes.checkpoint.loading import get_json
from mprecipes.checkpoint.manifest import NAME, Manifest, read_manifest
from mprecipes.checkpoint.snapshot import unwrap
from mprecipes.errors import ConfigError, VerificationError

FILE = "pretrained.json"
LINEAGE = "mprecipes.json"  # in an exported folder, what `ancestry` is read from
_OF_THE_BASE = ("config.json", "generation_config.json")  # a folder of adapters holds neither
SCHEMA = 1


def describe_pretrained(model: torch.nn.Module, tokenizer_dir: Path) -> dict[str, Any] | None:
    """Gives the value of `pretrained.json`; None of a model that is not of transformers.

    Args:
        model: a `PreTrainedModel` or a `peft.PeftModel`, also inside DDP and the like.
        tokenizer_dir: folder whose files are kept, chat templates included.
    """
    from transformers import PreTrainedModel  # seconds; whoever has such a model has paid for it

    bare: Any = unwrap(model)
    adapter = None
    if "peft" in sys.modules and isinstance(bare, sys.modules["peft"].PeftModel):
        adapter, bare = _adapter_config(bare), bare.get_base_model()
    if not isinstance(bare, PreTrainedModel):
        return None
    config = copy.deepcopy(bare.config)
    began_from = config.name_or_path
    architecture = type(bare).__name__.removeprefix("FSDP")  # FSDP2 renames the class
    config.architectures = [architecture]
    texts = {"config.json": config.to_json_string()}
    if bare.can_generate() and bare.generation_config is not None:
        texts["generation_config.json"] = bare.generation_config.to_json_string()
    if adapter is not None:
        texts[CONFIG] = adapter
    binaries = {}
    for path in sorted(path for path in tokenizer_dir.rglob("*") if path.is_file()):
        name, data = path.relative_to(tokenizer_dir).as_posix(), path.read_bytes()
        try:
            texts.setdefault(name, data.decode("utf-8"))
        except UnicodeDecodeError:
            binaries[name] = base64.b64encode(data).decode("ascii")
    return {
        "schema": SCHEMA,
        "architecture": architecture,
        "texts": texts,
        "binaries": binaries,
        "ancestry": ancestry_of(began_from),
    }


def _adapter_config(model: Any) -> str:
    """Gives the config of a PeftModel's adapter; of a local base only the last name."""
    fields = model.peft_config[model.active_adapter].to_dict()
    base = model.get_base_model().config.name_or_path or None
    is_local = base is not None and Path(base).is_absolute()
    fields["base_model_name_or_path"] = Path(base).name if base and is_local else base
    fields["inference_mode"] = True
    return json.dumps(
        fields, indent=2, sort_keys=True, default=sorted
    )  # a set is the only odd kind


def read_pretrained(manifest: Manifest) -> dict[str, Any]:
    """Gives the verified content of a checkpoint's `pretrained.json`.

    Raises:
        ConfigError: the checkpoint holds none.
        VerificationError: it is damaged, or not of ours.
    """
    where = f"{manifest.folder.name}/{FILE}"
    for entry in manifest.files:
        if entry.path == FILE:
            value = get_json(manifest.folder, entry)
            if problem := _misfit(value):
                raise VerificationError(
                    problem,
                    expected=f"the {FILE}, schema {SCHEMA}, that a save wrote",
                    where=where,
                    action="export another checkpoint, or use the version that wrote this one",
                )
            return value
    raise ConfigError(
        "absent",
        expected="the model's config and tokenizer, which a manager keeps that knows them",
        where=where,
        action="pass tokenizer_dir to CheckpointManager, resume, and export the next checkpoint",
    )


def write_files(pretrained: Mapping[str, Any], folder: Path, dtype: torch.dtype) -> None:
    """Writes config, generation config and tokenizer; the config names the dtype of the weights.

    Of adapters their own config in place of the two.
    """
    config = json.loads(pretrained["texts"]["config.json"])
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if "dtype" in part or part is config:
            part["dtype"] = str(dtype).removeprefix("torch.")
    files = {name: text.encode("utf-8") for name, text in pretrained["texts"].items()}
    files |= {name: base64.b64decode(text) for name, text in pretrained["binaries"].items()}
    files["config.json"] = json.dumps(config, indent=2, sort_keys=True).encode("utf-8") + b"\n"
    if CONFIG in files:
        files = {name: data for name, data in files.items() if name not in _OF_THE_BASE}
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def ancestry_of(began_from: str | None) -> list[dict[str, Any]]:
    """Gives what weights began from, nearest first.

    Args:
        began_from: a checkpoint or an exported folder, each with its own ancestry, or a name.
    """
    if not began_from:
        return []
    path = Path(began_from)
    if (path / NAME).is_file():
        manifest = read_manifest(path)
        own = lineage_of(manifest, {"ancestry": None}, "fp32")
        own = {key: value for key, value in own.items() if key not in ("schema", "ancestry")}
        return [own, *read_pretrained(manifest)["ancestry"]]
    try:
        found = json.loads((path / LINEAGE).read_text(encoding="utf-8"))
        own = {key: value for key, value in found.items() if key not in ("schema", "ancestry")}
        return [own, *found["ancestry"]]
    except (OSError, ValueError, KeyError, AttributeError):  # of somebody else's making
        return [{"model": path.name if path.is_absolute() else began_from}]


def _misfit(value: Any) -> str | None:
    kinds = {"schema": int, "architecture": str, "texts": dict, "binaries": dict, "ancestry": list}
    if not isinstance(value, dict):
        return "not an object"
    for key, kind in kinds.items():
        if not isinstance(value.get(key), kind):
            return f"{key} is of the wrong type or missing"
    if value["schema"] != SCHEMA:
        return f"schema {value['schema']}"
    for name, text in (value["texts"] | value["binaries"]).items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name or not isinstance(text, str):
            return f"a file {name!r:.120}"
    return None if "config.json" in value["texts"] else "no config.json"
