# SPDX-License-Identifier: Apache-2.0
"""A checkpoint back from the mirror, when the local disk has none that can be trusted."""

import logging

from mprecipes.checkpoint.manifest import Manifest, read_manifest, verify_folder
from mprecipes.checkpoint.mirror import Mirror, foreign
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.checkpoint.saving import check_space
from mprecipes.checkpoint.shelf import RunFolderLike, Shelf
from mprecipes.errors import CheckpointError, NoTrustedCheckpoint, RecipeError
from mprecipes.faults import fault_point

log = logging.getLogger(__name__)


def fetch_from_mirror(folder: RunFolderLike, policy: CheckpointPolicy) -> Manifest | None:
    """Brings the newest checkpoint of the mirror that verifies back to `checkpoints/`.

    Main process only, at start and under the lease, when no checkpoint here can be trusted: the
    disk is new, or what was on it is damaged. Rolling ones and milestones both count. None without
    a mirror, or when nothing was ever mirrored.

    On disk afterwards: the checkpoint, durable, verified and published like a saved one. The mirror
    then belongs to this run.

    Raises:
        CheckpointError: the mirror does not answer, or the checkpoint could not be written here or
            would fill the disk.
        NoTrustedCheckpoint: there are checkpoints and none verifies.
        ConfigError: they are another run's, and this one has been trained already.
    """
    if policy.mirror is None:
        return None
    mirror = Mirror(policy.mirror, folder.path)
    try:
        return _fetch(mirror, folder)
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


def _fetch(mirror: Mirror, folder: RunFolderLike) -> Manifest | None:
    owner = mirror.owner()
    trained = any((folder.path / "journal").glob("attempt-*.jsonl"))
    if owner is not None and trained and folder.run_id not in owner["run_ids"]:
        raise foreign(mirror, owner, folder.run_id)
    shelf = Shelf(folder.checkpoints, folder.quarantine, folder.run_id)
    refused = []
    for there in mirror.published():
        problems = [] if there.problem is None else [there.problem]
        if there.manifest is not None:
            step = there.manifest.step
            log.warning(
                "no checkpoint here can be trusted: fetching %s/%s", mirror.home, there.place
            )
            shelf.checkpoints.mkdir(parents=True, exist_ok=True)
            num_bytes = sum(entry.bytes for entry in there.manifest.files)
            check_space(shelf.checkpoints, num_bytes, where=f"fetching {mirror.home}/{there.place}")
            if (name := shelf.make_room(step)) is not None:
                return read_manifest(shelf.checkpoints / name)
            mirror.fetch(there, shelf.staging(step))
            problems = verify_folder(shelf.staging(step))
            if not problems:
                fault_point("fetch.before_publish", step)
                path = shelf.publish(step)
                fault_point("fetch.after_publish", step)
                mirror.claim(folder.run_id, [there.manifest.run_id])
                log.warning("step %d was fetched from the mirror and verifies", step)
                return read_manifest(path)
            shelf.remove(shelf.staging(step))
        refused.append(f"{there.place}: {'; '.join(map(str, problems))}")
        log.warning("%s does not verify and is passed over", refused[-1])
    if not refused:
        return None
    raise NoTrustedCheckpoint(
        "no checkpoint of the mirror verifies:\n    " + "\n    ".join(refused),
        expected="at least one whose every byte agrees with its manifest",
        where=mirror.home,
        action="put an intact copy into checkpoints/, or start again with another --output_dir",
    )
