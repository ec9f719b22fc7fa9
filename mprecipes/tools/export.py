# SPDX-License-Identifier: Apache-2.0
"""`mprecipes export`: a checkpoint or milestone as a Hugging Face folder."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mprecipes.errors import ConfigError


def export(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a checkpoint or milestone.")],
    dest: Annotated[Path, typer.Argument(help="A new folder, or an empty one.")],
    dtype: Annotated[
        str, typer.Option("--dtype", help="fp32: the masters; bf16, fp16: rounded.")
    ] = "fp32",
    max_shard_size: Annotated[
        str, typer.Option("--max_shard_size", help="Bytes a weights file may have, as 500MB.")
    ] = "2GB",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON text instead of a line.")
    ] = False,
) -> None:
    """Make a Hugging Face folder of a checkpoint: weights, config, tokenizer and a model card.

    Runs on the processor, with memory for a chunk and not for the model. The checkpoint is verified
    while it is read, and the folder is loaded and compared with it before it gets its name.
    """
    facts = export_folder(checkpoint, dest, dtype=dtype, max_shard_size=max_shard_size)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print(
            f"{facts['path']}: step {facts['step']} as {facts['dtype']}, {facts['num_bytes']:,} "
            "bytes of weights, loaded and equal to the checkpoint"
        )


def export_folder(
    checkpoint: Path, dest: Path, *, dtype: str, max_shard_size: str
) -> dict[str, Any]:
    """Exports, and gives what there is now.

    Raises:
        ConfigError: not the folder of one checkpoint; or see `export_checkpoint`.
        VerificationError, CheckpointError: see `export_checkpoint`.
    """
    from mprecipes.checkpoint.export import export_checkpoint
    from mprecipes.tools.verify import is_checkpoint, newest_checkpoint

    if not is_checkpoint(checkpoint):
        newest = newest_checkpoint(checkpoint)
        raise ConfigError(
            "a run folder" if newest else "no checkpoint",
            expected="the folder of one checkpoint or milestone",
            where=str(checkpoint),
            action=f"name one, such as {newest or 'RUN/milestones/NAME'}",
        )
    path = export_checkpoint(checkpoint, dest, dtype=dtype, max_shard_size=max_shard_size)
    lineage = json.loads((path / "mprecipes.json").read_text(encoding="utf-8"))
    files = sorted(file.name for file in path.iterdir())
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    return {"path": str(path), **lineage, "files": files, "num_bytes": sum(sizes)}
