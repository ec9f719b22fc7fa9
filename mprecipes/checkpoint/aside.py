# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a resume passes over: set aside, never deleted by us, never loaded.

On disk: `set_aside/step-00000500/`, moved there whole, and `set_aside/step-00000500.reason.json`.
To use one again, move its folder back into `checkpoints/` (or name its step with `--resume_from`).
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from mprecipes.checkpoint.abandoned import abandon
from mprecipes.checkpoint.manifest import Manifest, read_manifest, verify_folder
from mprecipes.checkpoint.milestones import copy_file, read_milestones
from mprecipes.checkpoint.shelf import Shelf, step_name
from mprecipes.errors import CheckpointError, ConfigError, VerificationError
from mprecipes.identity.files import fsync_directory, write_json_atomically

FOLDER = "set_aside"


def set_aside(
    run: Path,
    checkpoints: Path,
    reason: Callable[[Manifest], str | None],
    *,
    attempt: int,
    from_step: int | None = None,
) -> list[int]:
    """Where this rank writes: moves the checkpoints for which there is a reason; gives their steps.

    They are abandoned at the mirror, too; those that stay are not.

    Args:
        from_step: what only the mirror has from this step on is also abandoned.

    Raises:
        CheckpointError: one could not be moved, or `abandoned.json` not be written.
    """
    here = [
        (manifest, reason(manifest))
        for manifest in Shelf(checkpoints, run / "quarantine", "").scan()[0]
    ]
    leaving = [manifest for manifest, why in here if why is not None]
    kept = [manifest for manifest, why in here if why is None]
    abandon(run, leaving, from_step=from_step, kept=kept)
    moved = []
    for manifest, why in here:
        if why is None:
            continue
        folder, target, number = run / FOLDER, run / FOLDER / manifest.folder.name, 1
        while os.path.lexists(target):
            number += 1
            target = folder / f"{manifest.folder.name}.{number}"
        try:
            folder.mkdir(exist_ok=True)
            facts = {"step": manifest.step, "attempt": attempt, "time": time.time(), "reason": why}
            write_json_atomically(folder / f"{target.name}.reason.json", facts)
            manifest.folder.rename(target)
            fsync_directory(folder)
            fsync_directory(checkpoints)
        except OSError as error:
            raise CheckpointError(
                f"{manifest.folder.name} could not be set aside ({error})",
                expected=f"{FOLDER}/ on the disk of checkpoints/, writable",
                where=str(manifest.folder),
                action="move it out of checkpoints/ by hand, then launch again",
            ) from error
        moved.append(manifest.step)
    return moved


def steps_to_choose(run: Path, checkpoints: Path) -> list[int]:
    """Gives the steps of all checkpoints and milestones, those that were set aside too."""
    here = Shelf(checkpoints, run / "quarantine", "").scan()[0]
    return sorted({manifest.step for manifest in here} | {step for step, _ in _others(run)})


def choose(
    run: Path,
    checkpoints: Path,
    step: int,
    *,
    attempt: int,
    known: Collection[int] | None = None,
) -> list[int]:
    """Where this rank writes: makes `step` the newest checkpoint; gives the steps set aside.

    Later ones are set aside. A step that is not in `checkpoints/` is copied from a milestone of it,
    or moved back from `set_aside/`; one that only other nodes have is sent later.

    Args:
        known: `steps_to_choose` of all nodes; None where there is one.

    Raises:
        ConfigError: there is no such step, and those there are are named; or it does not verify.
        CheckpointError: something could not be moved or copied.
    """
    known = steps_to_choose(run, checkpoints) if known is None else known
    if step not in known:
        raise ConfigError(
            f"--resume_from {step}",
            expected="the step of a checkpoint or milestone: "
            + (", ".join(map(str, sorted(known))) or "none"),
            where="resume_from",
            action="name one of these, or leave the flag out to go on from the newest",
        )
    here = {manifest.step for manifest in Shelf(checkpoints, run / "quarantine", "").scan()[0]}
    others = [folder for number, folder in _others(run) if number == step]
    if step not in here and others:
        _bring(_first_good(others, step), checkpoints / step_name(step))
    why = f"--resume_from {step}: this one is later"
    return set_aside(
        run,
        checkpoints,
        lambda m: why if m.step > step else None,
        attempt=attempt,
        from_step=step + 1,
    )


def _others(run: Path) -> list[tuple[int, Path]]:
    """Steps of milestones, and of what was set aside, the latest first, by their manifests."""
    found = [*read_milestones(run / "milestones").values()]
    for path in sorted((run / FOLDER).glob("step-*"), reverse=True):
        if path.is_dir():
            with contextlib.suppress(VerificationError):
                found.append(read_manifest(path))
    return [(manifest.step, manifest.folder) for manifest in found]


def _first_good(folders: Sequence[Path], step: int) -> Path:
    found = []
    for folder in folders:
        if not (problems := verify_folder(folder)):
            return folder
        found.append(f"{folder.parent.name}/{folder.name}: {'; '.join(map(str, problems))}")
    raise ConfigError(
        f"--resume_from {step}: " + "; ".join(found),
        expected="a checkpoint whose every byte agrees with its manifest",
        where="resume_from",
        action="name another step, or leave the flag out to go on from the newest; nothing was "
        "moved or copied",
    )


def _bring(source: Path, target: Path) -> None:
    staging = target.with_name(f".staging-{target.name}-chosen")
    try:
        staging.mkdir(parents=True)
        for path in sorted(source.iterdir()):
            copy_file(path, staging / path.name)
        fsync_directory(staging)
        staging.rename(target)
        fsync_directory(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{type(error).__name__}: {error}",
            expected=f"a durable copy of {source.name} as checkpoints/{target.name}",
            where=str(source),
            action="free space or repair the disk, then launch the same command again",
        ) from error
