# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters as folders: the adapter for `peft`, and the model it is merged into.

The adapter is exported from its checkpoint like any other weights. Those of a frozen base are in no
checkpoint; they are read again, or for a new model built again, and compared with what was trained
on by digest. So it does not matter into which shards an engine has cut the model in use.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch

from mprecipes.checkpoint.card import lineage_of, model_card
from mprecipes.checkpoint.export import export_checkpoint, quiet
from mprecipes.checkpoint.manifest import Manifest
from mprecipes.checkpoint.pretrained import LINEAGE, read_pretrained
from mprecipes.checkpoint.shelf import RunFolderLike, Shelf
from mprecipes.checkpoint.starting import Options as StartOptions
from mprecipes.checkpoint.starting import model_facts, start_model
from mprecipes.compute.tuning import tuning_options
from mprecipes.errors import VerificationError
from mprecipes.identity.files import fsync_directory


class Options(StartOptions, Protocol):
    """The options of a recipe's config that `export_adapter` reads."""

    @property
    def seed(self) -> int: ...
    @property
    def tuning(self) -> dict[str, Any] | None: ...


def export_adapter(run: RunFolderLike, config: Options, tokenizer_dir: Path) -> None:
    """Writes `adapter/` for `peft`, and `model/` with the adapter merged into FP32 weights.

    Main process only, when the last save has ended; takes host memory for the whole model in FP32.
    On disk afterwards: each folder whole, or as it was before.

    Raises:
        VerificationError: the base is not the one that was trained on, or see `export_checkpoint`.
        CheckpointError, ConfigError: see `export_checkpoint` and `start_model`.
    """
    newest = Shelf(run.checkpoints, run.quarantine, run.run_id).scan()[0][0]
    adapter = export_checkpoint(newest.folder, run.path / "adapter", replace=True)
    merged = _with_adapter(config, adapter, newest).merge_and_unload()
    _write(run.path / "model", newest, merged, tokenizer_dir)


def _with_adapter(config: Options, adapter: Path, manifest: Manifest) -> Any:
    """Gives the base, as it was before the first step, with the adapter on it."""
    from peft import PeftModel
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # else ZeRO-3 would cut it into shards
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(config.seed)  # as seed_everything does before a new model is built
        base = start_model(config, tuning_options(config.tuning))
        model = PeftModel.from_pretrained(base, adapter, is_trainable=True, torch_device="cpu")
    expected = (manifest.raw.get("frozen") or {}).get("digest")
    found = model_facts(model, None)["frozen"]["digest"]
    if found != expected:
        raise VerificationError(
            f"a base with digest {found}",
            expected=f"the base that was trained on, with digest {expected}",
            where=f"model_name_or_path {config.model_name_or_path}",
            action="put the base back as it was and launch again; adapter/ is written and good",
        )
    return model


def _write(destination: Path, manifest: Manifest, model: Any, tokenizer_dir: Path) -> None:
    ancestry = read_pretrained(manifest)["ancestry"]
    staging = destination.with_name(f".{destination.name}.staging")
    shutil.rmtree(staging, ignore_errors=True)
    shutil.copytree(tokenizer_dir, staging)
    with quiet():
        model.save_pretrained(staging)
    about = {"architecture": type(model).__name__, "ancestry": ancestry}
    lineage = json.dumps(lineage_of(manifest, about, "fp32"), indent=2) + "\n"
    (staging / LINEAGE).write_text(lineage, encoding="utf-8")
    (staging / "README.md").write_text(model_card(manifest, about, "fp32"), encoding="utf-8")
    for path in staging.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
    fsync_directory(staging)
    shutil.rmtree(destination, ignore_errors=True)
    staging.rename(destination)
    fsync_directory(destination.parent)
