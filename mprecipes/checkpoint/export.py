# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a Hugging Face folder: whole, verified and compared, or absent.

One road for the end of a run and for `mprecipes export`, on the processor, from the files of the
checkpoint alone: the engine that trained does not matter, and a milestone copied elsewhere is
enough. The checkpoint is verified while it is read, and values go from its files to their place in
the new ones in chunks: memory does not grow with the model. Then `from_pretrained` loads the
folder, whose files it maps into memory, and every value is compared with the checkpoint again.

Weights keep the names they have in the checkpoint; adapters get those that `peft` reads.
"""

import contextlib
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mprecipes.checkpoint import storage
from mprecipes.checkpoint.adapter_file import CONFIG, AdapterWriter, read_adapter
from mprecipes.checkpoint.card import lineage_of, model_card
from mprecipes.checkpoint.manifest import Manifest, read_manifest
from mprecipes.checkpoint.pretrained import LINEAGE, read_pretrained, write_files
from mprecipes.checkpoint.shards import (
    INDEX,
    ShardWriter,
    index_of,
    parse_size,
    plan_shards,
)
from mprecipes.checkpoint.shelf import RunFolderLike, Shelf
from mprecipes.checkpoint.weights import Piece, each_piece
from mprecipes.errors import CheckpointError, ConfigError, RecipeError, VerificationError
from mprecipes.identity.files import fsync_directory

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SPACE_MARGIN_BYTES = 64 << 20
_STORED = {str(dtype).removeprefix("torch."): dtype for dtype in storage.DTYPES}


def export_newest(run: RunFolderLike, *, dtype: str = "fp32") -> Path:
    """Exports a run's newest checkpoint to `model/` in its folder, and gives that.

    Main process only, when the last save has ended. An export of an earlier attempt is replaced.

    Raises:
        CheckpointError, ConfigError, VerificationError: see `export_checkpoint`.
    """
    found = Shelf(run.checkpoints, run.quarantine, run.run_id).scan()[0]
    if not found:
        raise ConfigError(
            "no checkpoint",
            expected="a run that has saved",
            where="checkpoints/",
            action="launch the run again; it saves at its last step",
        )
    return export_checkpoint(found[0].folder, run.path / "model", dtype=dtype, replace=True)


def export_checkpoint(
    checkpoint: Path,
    destination: Path,
    *,
    dtype: str = "fp32",
    max_shard_size: str = "2GB",
    replace: bool = False,
) -> Path:
    """Writes what `from_pretrained(destination)` loads, and gives `destination`; blocks.

    On disk afterwards: the whole folder, durable, or what was there before.

    Args:
        checkpoint: the folder of a checkpoint or milestone.
        dtype: "fp32", the masters bit by bit; "bf16" or "fp16", the masters rounded to nearest
            even. Tensors that are not floating-point stay as they are.
        replace: delete what is at `destination`; otherwise only an empty folder may be there.

    Raises:
        ConfigError: an option, or what is at `destination`, is refused; or the checkpoint does not
            know its model's config.
        VerificationError: the checkpoint is damaged, or what was written does not load as it was.
        CheckpointError: the disk is full or fails.
    """
    max_bytes, wanted = parse_size(max_shard_size), _check_dtype(dtype)
    if not replace:
        _refuse_taken(destination)
    manifest = read_manifest(checkpoint)
    pretrained = read_pretrained(manifest)
    staging = destination.with_name(f".{destination.name}.staging")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove(staging)
        staging.mkdir()
        dtypes, is_adapter = _dtypes(manifest, wanted), CONFIG in pretrained["texts"]
        _write_weights(manifest, dtypes, staging, None if is_adapter else max_bytes)
        write_files(pretrained, staging, wanted)
        _write_json(staging / LINEAGE, lineage_of(manifest, pretrained, dtype))
        card = model_card(manifest, pretrained, dtype)
        (staging / "README.md").write_text(card, encoding="utf-8")
        if is_adapter:
            _compare(manifest, dtypes, read_adapter(staging, [*dtypes]), "safetensors")
        else:
            model = _loaded(staging, pretrained["architecture"])
            _compare(manifest, dtypes, model.state_dict(keep_vars=True), "from_pretrained")
        _make_durable(staging)
        if replace:
            _remove(destination)
        staging.rename(destination)
        fsync_directory(destination.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, RecipeError):
            raise CheckpointError(
                f"{type(error).__name__}: {error.strerror}",
                expected="a folder that can be written; nothing was left behind",
                where=str(destination),
                action="free space or repair the disk, then export again",
            ) from error
        raise
    return destination


def _write_weights(
    manifest: Manifest, dtypes: dict[str, torch.dtype], staging: Path, max_bytes: int | None
) -> None:
    if max_bytes is None:  # of adapters
        with AdapterWriter(staging, dtypes, manifest.shapes) as adapter:
            return _copy(manifest, dtypes, adapter)
    shards = plan_shards(dtypes, manifest.shapes, max_bytes)
    _check_space(staging, sum(shard.num_bytes for shard in shards))
    with ShardWriter(staging, shards) as writer:
        _copy(manifest, dtypes, writer)
    if len(shards) > 1:
        _write_json(staging / INDEX, index_of(shards, manifest.shapes))


def _copy(
    manifest: Manifest, dtypes: dict[str, torch.dtype], writer: ShardWriter | AdapterWriter
) -> None:
    """Every value to its place, cast on the way.

    Raises:
        VerificationError: the files hold other weights than the manifest says.
        ConfigError: a value is too large for the dtype.
    """
    missing = {name: math.prod(shape) for name, shape in manifest.shapes.items()}
    counting = threading.Lock()

    def copy(piece: Piece) -> None:
        stored = str(piece.values.dtype).removeprefix("torch.")
        if stored != manifest.params.get(piece.name):
            raise _other_weights(manifest, f"{piece.name} in {stored}")
        values = piece.values.to(dtypes[piece.name])
        if values.dtype == torch.float16 and not values.isfinite().all():
            raise _too_large(piece.name, float(piece.values.abs().max()))
        writer.write(piece.name, piece.start, values)
        with counting:
            missing[piece.name] -= values.numel()

    each_piece(manifest, copy)
    if wrong := sorted(name for name, count in missing.items() if count):
        raise _other_weights(manifest, f"not every value once of {', '.join(wrong[:6])}")


def _compare(
    manifest: Manifest, dtypes: dict[str, torch.dtype], state: dict[str, torch.Tensor], by: str
) -> None:
    """Compares every value of what the folder gives, loaded as anyone would, with the checkpoint.

    Raises:
        VerificationError: something is missing, new, or another value.
    """
    tensors = {name: tensor.detach() for name, tensor in state.items()}
    kept = {tensors[name].data_ptr() for name in manifest.params if name in tensors}
    problems = [f"{name} is not in the model" for name in manifest.params if name not in tensors]
    problems += [
        f"{name} is not in the checkpoint"
        for name, tensor in tensors.items()
        if name not in manifest.params and tensor.data_ptr() not in kept  # tied ones share memory
    ]
    different: set[str] = set()

    def compare(piece: Piece) -> None:
        expected = piece.values.to(dtypes[piece.name])
        found = tensors[piece.name].reshape(-1)[piece.start : piece.start + expected.numel()]
        if not _same_bits(found.to(expected.dtype), expected):
            different.add(piece.name)

    if not problems:
        each_piece(manifest, compare)
    problems += [f"{name} has other values" for name in sorted(different)]
    if problems:
        raise VerificationError(
            f"{len(problems)} differences: " + "; ".join(problems[:6]),
            expected=f"the weights of {manifest.folder.name}, each value as it was written",
            where=f"{by} on the exported folder",
            action="nothing was exported; a model whose ties or names are made in code outside "
            "transformers has to be saved by that code",
        )


def _loaded(folder: Path, architecture: str) -> torch.nn.Module:
    import transformers
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # else ZeRO-3 would cut the loaded model into shards, on one rank
    kind: Any = getattr(transformers, architecture, None)
    if kind is None:
        raise ConfigError(
            f"a model of class {architecture}",
            expected="a class of transformers",
            where="pretrained.json, architecture",
            action="save a model of your own code with its own save_pretrained",
        )
    with quiet():
        model: torch.nn.Module = kind.from_pretrained(folder, dtype="auto", local_files_only=True)
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' own bar and its report on names off the console: `_compare` decides."""
    from transformers.utils import logging as hf_logging

    was_shown, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if was_shown:
            hf_logging.enable_progress_bar()


def _dtypes(manifest: Manifest, wanted: torch.dtype) -> dict[str, torch.dtype]:
    """What each parameter becomes; only floating-point ones change."""
    if odd := sorted(manifest.params.keys() ^ manifest.shapes.keys()):
        raise _other_weights(manifest, f"{odd[0]} without dtype or shape")
    dtypes: dict[str, torch.dtype] = {}
    for name, text in manifest.params.items():
        dtype = _STORED.get(text)
        if dtype is None:
            raise _other_weights(manifest, f"{name} of dtype {text!r:.60}")
        dtypes[name] = wanted if dtype.is_floating_point else dtype
    return dtypes


def _too_large(name: str, value: float) -> ConfigError:
    return ConfigError(
        f"{name} holds {value:g}",
        expected="values up to 65504, the largest of FP16",
        where="--dtype fp16",
        action="export as --dtype bf16 or --dtype fp32; nothing was written",
    )


def _other_weights(manifest: Manifest, found: str) -> VerificationError:
    return VerificationError(
        found,
        expected="the parameters of the manifest, each value once",
        where=manifest.folder.name,
        action="export another checkpoint; mprecipes verify says which are good",
    )


def _check_dtype(dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise ConfigError(
            f"dtype {dtype!r}",
            expected=f"one of {', '.join(DTYPES)}",
            where="--dtype",
            action="write for example --dtype bf16",
        )
    return DTYPES[dtype]


def _refuse_taken(destination: Path) -> None:
    if not os.path.lexists(destination):
        return
    if destination.is_dir() and not destination.is_symlink() and not os.listdir(destination):
        return
    raise ConfigError(
        "a folder that is not empty" if destination.is_dir() else "something that is no folder",
        expected="a new folder, or an empty one",
        where=str(destination),
        action="name another DEST; nothing here is overwritten",
    )


def _check_space(folder: Path, num_bytes: int) -> None:
    free, needed = shutil.disk_usage(folder).free, num_bytes + SPACE_MARGIN_BYTES
    if free < needed:
        raise CheckpointError(
            f"{free / 1e9:.2f} GB are free",
            expected=f"{needed / 1e9:.2f} GB for the weights",
            where=str(folder.parent),
            action="free space, or export to another disk; nothing was written",
        )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _make_durable(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        else:
            fsync_directory(path)
    fsync_directory(folder)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
