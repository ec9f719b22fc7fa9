# SPDX-License-Identifier: Apache-2.0
"""What `mprecipes status` and `mprecipes inspect` say, as plain values; reads only."""

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

from mprecipes.checkpoint.manifest import read_manifest
from mprecipes.errors import ConfigError
from mprecipes.identity.history import read_run, status_code
from mprecipes.resume.journal import Rollback, decode
from mprecipes.tools.verify import is_checkpoint, newest_checkpoint

TAIL_BYTES = 64 * 1024


def describe_run(path: Path) -> dict[str, Any]:
    """Gives what is known of a run, `attempts` last: one dict each, in the order of the table.

    `last_step` is the journal's, which goes further than any checkpoint.

    Raises:
        ConfigError: the folder is no run.
    """
    info = read_run(path)
    shown = ("attempt", "started", "ended", "outcome", "exit_code", "world_size")
    attempts = []
    for entry in info.attempts:
        facts = {name: entry.get(name) for name in shown}
        facts["outcome"] = facts["outcome"] or ("running" if info.is_running else None)
        journaled = _last_step(path / "journal" / f"attempt-{entry['attempt']:04d}.jsonl")
        noted = None if facts["outcome"] == "refused" else entry.get("step")  # it made none
        facts["last_step"] = noted if journaled is None else journaled
        attempts.append({**facts, "error": entry.get("error")})
    steps = [attempt["last_step"] for attempt in attempts if attempt["last_step"] is not None]
    newest = newest_checkpoint(path)
    holder = info.lease or {}
    return {
        "run_id": info.run_id,
        "recipe": "@".join(str(info.recipe.get(name, "unknown")) for name in ("name", "version")),
        "recipe_status": info.recipe.get("status"),
        "created": info.created,
        "outcome": info.outcome,
        "running": info.is_running,
        "process": f"{holder['pid']} on {holder['host']}" if info.is_running else None,
        "last_step": steps[-1] if steps else None,
        "horizon": info.horizon,
        "newest_checkpoint": newest.name if newest else None,
        "exit_code": status_code(info),
        "attempts": attempts,
    }


def _last_step(journal: Path) -> int | None:
    """Gives the step that the last whole line leaves the run at, reading only the file's end."""
    try:
        with open(journal, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        if not lines:
            return None
        last = decode(lines[-1])
        return last.to_step if isinstance(last, Rollback) else last.step
    except (FileNotFoundError, ValueError):
        return None


def describe_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gives a manifest's summary (name -> value, `files` last) and the whole manifest.

    Raises:
        ConfigError: the folder is no checkpoint.
        VerificationError: its manifest is damaged.
    """
    if not folder.is_dir() or not is_checkpoint(folder):
        raise ConfigError(
            "a folder without a checkpoint" if folder.is_dir() else "no such folder",
            expected="the folder of one checkpoint, with its manifest.json",
            where=str(folder),
            action="name one folder under a run's checkpoints/ or milestones/",
        )
    manifest = read_manifest(folder)
    raw = manifest.raw
    dtypes = Counter(manifest.params.values())
    elements = sum(math.prod(shape) for shape in manifest.shapes.values())
    sizes = [entry.bytes for entry in manifest.files]
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items()))
    skipped = [f"{first:,} to {end - 1:,}" for first, end in manifest.skipped_samples]
    summary = {
        "step": raw["step"],
        "updates": raw["updates"],
        "samples seen": f"{raw['samples_seen']:,}",
        **({"samples skipped": ", ".join(skipped)} if skipped else {}),
        "tokens seen": f"{raw['tokens_seen']:,}",
        "run": raw["run_id"],
        "milestone": raw["milestone"],
        "recipe": _flat(raw["recipe"]),
        "precision": _flat(raw["precision"]),
        "topology": _flat(raw["topology"]),
        "data": _flat(raw["data"]),
        "parameters": f"{elements:,} in {len(manifest.params)} tensors: {kinds}",
        **{f"state digest, {name}": digest for name, digest in manifest.state_digests.items()},
        "root sha256": manifest.root_sha256,
        "size": f"{sum(sizes):,} bytes in {len(sizes)} files",
        "files": raw["files"],
    }
    return summary, raw


def _flat(facts: dict[str, Any] | None) -> str:
    return "\n".join(f"{name}: {value}" for name, value in (facts or {}).items())
