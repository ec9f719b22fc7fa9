# SPDX-License-Identifier: Apache-2.0
"""A checkpoint back from the mirror, when the local disk has none that can be trusted."""

import logging

from mprecipes.checkpoint.abandoned import abandoned_roots, read_cuts
from mprecipes.checkpoint.manifest import NAME, Manifest, Problem, read_manifest, verify_folder
from mprecipes.checkpoint.mirror import Mirror, Mirrored, foreign
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.checkpoint.saving import check_space
from mprecipes.checkpoint.shelf import RunFolderLike, Shelf
from mprecipes.errors import CheckpointError, NoTrustedCheckpoint, RecipeError
from mprecipes.faults import fault_point

log = logging.getLogger(__name__)


def fetch_from_mirror(
    folder: RunFolderLike, policy: CheckpointPolicy, *, before: int | None = None
) -> Manifest | None:
    """Brings the newest checkpoint of the mirror that verifies back to `checkpoints/`.

    Main process only, at start and under the lease, when no checkpoint here can be trusted: the
    disk is new, or what was on it is damaged. Rolling ones and milestones both count, those of a
    branch that was given up do not. None without a mirror, or when nothing was ever mirrored.

    Args:
        before: only a checkpoint from before this step is brought here; None for any.

    On disk afterwards: the checkpoint, durable, verified and published like a saved one. The mirror
    then belongs to this run.

    Raises:
        CheckpointError: the mirror does not answer, or the checkpoint could not be written here or
            would fill the disk.
        NoTrustedCheckpoint: there are checkpoints and none that may be taken verifies.
        ConfigError: they are another run's, and this one has been trained already.
    """
    if policy.mirror is None:
        return None
    mirror = Mirror(policy.mirror, folder.path)
    try:
        return _fetch(mirror, folder, before)
    except RecipeError:
        raise
    except Exception as error:  # file systems raise what they like
        raise CheckpointError(
            f"{type(error).__name__}: {error}",
            expected="a checkpoint from the mirror, since none here can be trusted",
            where=mirror.home,
            action="repair the connection or free space and launch again; without `mirror` in the "
            "option checkpoint the run starts from step 0",
        ) from error


def _fetch(mirror: Mirror, folder: RunFolderLike, before: int | None) -> Manifest | None:
    owner = mirror.owner()
    trained = any((folder.path / "journal").glob("attempt-*.jsonl"))
    if owner is not None and trained and folder.run_id not in owner["run_ids"]:
        raise foreign(mirror, owner, folder.run_id)
    published = mirror.published()
    found = [each.manifest for each in published if each.manifest is not None]
    known, noted = mirror.abandoned()
    abandoned = abandoned_roots(read_cuts(folder.path), found, known=known, noted=noted)
    refused = []
    for there in published:
        problems = _refused(there, abandoned, before)
        if not problems:
            manifest, problems = _bring(mirror, folder, there)
            if manifest is not None:
                return manifest
        refused.append(f"{there.place}: {'; '.join(map(str, problems))}")
        log.warning("%s is passed over", refused[-1])
    if not refused:
        return None
    which = "" if before is None else f" from before step {before}"
    raise NoTrustedCheckpoint(
        f"no checkpoint of the mirror{which} verifies:\n    " + "\n    ".join(refused),
        expected=f"at least one{which} whose every byte agrees with its manifest",
        where=mirror.home,
        action="put an intact copy into checkpoints/, or start again with another --output_dir",
    )


def _refused(there: Mirrored, abandoned: frozenset[str], before: int | None) -> list[Problem]:
    """Why a checkpoint is not even fetched, if so."""
    if there.manifest is None:
        assert there.problem is not None
        return [there.problem]
    if before is not None and there.manifest.step >= before:
        return [Problem(NAME, f"step {there.manifest.step}", f"a step before {before}")]
    if there.manifest.root_sha256 in abandoned:
        return [Problem(NAME, "of a branch that was given up", "of the one that went on")]
    return []


def _bring(
    mirror: Mirror, folder: RunFolderLike, there: Mirrored
) -> tuple[Manifest | None, list[Problem]]:
    """Fetches and publishes a checkpoint; gives its manifest, or what is wrong with it."""
    assert there.manifest is not None
    step, place = there.manifest.step, f"{mirror.home}/{there.place}"
    shelf = Shelf(folder.checkpoints, folder.quarantine, folder.run_id)
    log.warning("no checkpoint here can be trusted: fetching %s", place)
    shelf.checkpoints.mkdir(parents=True, exist_ok=True)
    num_bytes = sum(entry.bytes for entry in there.manifest.files)
    check_space(shelf.checkpoints, num_bytes, where=f"fetching {place}")
    if (name := shelf.make_room(step)) is not None:
        return read_manifest(shelf.checkpoints / name), []
    mirror.fetch(there, shelf.staging(step))
    if problems := verify_folder(shelf.staging(step)):
        shelf.remove(shelf.staging(step))
        return None, problems
    fault_point("fetch.before_publish", step)
    path = shelf.publish(step)
    fault_point("fetch.after_publish", step)
    mirror.claim(folder.run_id, [there.manifest.run_id])
    log.warning("step %d was fetched from the mirror and verifies", step)
    return read_manifest(path), []
