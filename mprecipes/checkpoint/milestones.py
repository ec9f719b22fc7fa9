# SPDX-License-Identifier: Apache-2.0
"""Named checkpoints that nothing here ever deletes: real copies, verified again after copying.

On disk: `milestones/<name>/` holds byte for byte the files of the checkpoint it was copied from, so
its digests hold and it is read, verified and mirrored like any other; `milestones/<name>.json` says
`name`, `step`, `root_sha256`, `copied_from`, `method` and `time`. `.staging-...` is a copy being
made. Where the file system shares blocks (btrfs, XFS) the copy is a reflink: it costs no space, and
outlives the deletion of the other, but not damage to the blocks they share.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from pathlib import Path

from mprecipes.checkpoint.manifest import Manifest, Problem, read_manifest, verify_folder
from mprecipes.errors import CheckpointError, ConfigError, RecipeError, VerificationError
from mprecipes.faults import fault_point
from mprecipes.identity.files import fsync_directory, remove_unfinished, write_json_atomically

FICLONE = 0x40049409  # Source: linux/fs.h, _IOW(0x94, 9, int); ioctl_ficlone(2)
MAX_NAME = 64
_UNSUPPORTED = (
    errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EPERM,
)  # fmt: skip


def check_name(name: str) -> str:
    """Gives the name back if a milestone may be called so.

    Raises:
        ConfigError: it is not 1 to 64 letters, digits, `.`, `_` or `-`, begins with another sign
            than a letter or digit, or ends in `.json`.
    """
    if re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}", name) is None:
        found = f"{name!r:.120}"
    elif name.endswith(".json"):
        found = f"{name!r}, which ends in .json"
    else:
        return name
    raise ConfigError(
        found,
        expected=f"1 to {MAX_NAME} letters, digits, '.', '_' or '-', a letter or digit first",
        where="name of a milestone",
        action="choose another name, for example pretrain-end",
    )


def read_milestones(milestones: Path) -> dict[str, Manifest]:
    """Gives the milestones whose manifest can be read, by name; their files are not read."""
    found = {}
    for path in sorted(milestones.iterdir()) if milestones.is_dir() else ():
        if path.is_dir() and path.name[0] != ".":
            with contextlib.suppress(VerificationError):  # `mprecipes verify` reports it
                found[path.name] = read_manifest(path)
    return found


def is_taken(path: Path, there: Manifest | None, manifest: Manifest) -> bool:
    """Whether a milestone's name is another checkpoint's, or that of one that cannot be read."""
    if there is None:
        return os.path.lexists(path)
    return there.root_sha256 != manifest.root_sha256


def make_milestone(source: Manifest, milestones: Path, name: str) -> Manifest:
    """Copies a published checkpoint to `milestones/<name>` and verifies every byte of the copy.

    On disk afterwards: the whole copy, durable, or nothing under that name. Blocks for the copy and
    for reading it again. A milestone of this name that is this very checkpoint is kept.

    Raises:
        ConfigError: the name is not allowed, or another checkpoint has it.
        DamagedSource: the checkpoint does not verify.
        VerificationError: the milestone that is there does not.
        CheckpointError: the copy could not be made.
    """
    target = milestones / check_name(name)
    if os.path.lexists(target):
        return _existing(source, target)
    staging = milestones / f".staging-{name}"
    try:
        milestones.mkdir(parents=True, exist_ok=True)
        _remove(staging)
        staging.mkdir()
        fault_point("milestone.before_copy", source.step)
        methods: set[str] = set()
        for path in sorted(source.folder.iterdir()):
            methods.add(copy_file(path, staging / path.name))
            fault_point("milestone.in_copy", source.step)
        fsync_directory(staging)
        fault_point("milestone.after_copy", source.step)
        if problems := verify_folder(staging):
            raise _bad_copy(source, problems)
        if (found := read_manifest(staging).root_sha256) != source.root_sha256:
            raise OSError(f"the checkpoint changed meanwhile (root_sha256 {found})")
        fault_point("milestone.before_publish", source.step)
        staging.rename(target)
        fault_point("milestone.after_rename", source.step)
        fsync_directory(milestones)
        _describe(source, target, "reflink" if methods == {"reflink"} else "copy")
    except OSError as error:
        _remove(staging)
        if isinstance(error, RecipeError):
            raise
        raise CheckpointError(
            f"{type(error).__name__}: {error}",
            expected=f"a durable copy of {source.folder.name}",
            where=f"milestones/{name}",
            action="free space or repair the disk, then run: mprecipes milestone RUN "
            f"{source.step} {name}",
        ) from error
    except VerificationError:
        _remove(staging)
        raise
    return read_manifest(target)


def sweep(milestones: Path) -> None:
    """Removes copies that a dead process left unfinished."""
    for path in milestones.glob(".staging-*"):
        _remove(path)
    remove_unfinished(milestones)


def copy_file(source: Path, target: Path) -> str:
    """Copies one regular file durably; gives "reflink" or "copy".

    Not from the page cache alone: the copy's pages are dropped after the fsync, so that reading it
    again reads the disk where the file system allows that.

    Raises:
        OSError: it is no regular file, or could not be read or written.
    """
    with (
        open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as reader,
        open(target, "xb", buffering=0) as writer,
    ):
        method = _reflink(reader.fileno(), writer.fileno())
        if method is None:
            _copy_bytes(reader.fileno(), writer.fileno())
        os.fsync(writer.fileno())
        os.posix_fadvise(writer.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return method or "copy"


def _reflink(source: int, target: int) -> str | None:
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return None
    return "reflink"


def _copy_bytes(source: int, target: int) -> None:
    """Copies inside the kernel where it can: copy_file_range, else sendfile, else by hand."""
    size, done = os.fstat(source).st_size, 0
    for copy in (_by_range, os.sendfile):
        try:
            while done < size:
                count = copy(target, source, done, min(size - done, 1 << 30))
                if count == 0:
                    break
                done += count
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        if done == size:
            return
    while chunk := os.pread(source, 1 << 20, done):
        done += os.pwrite(target, chunk, done)


def _by_range(target: int, source: int, offset: int, count: int) -> int:
    written = os.copy_file_range(source, target, count, offset, offset)
    os.lseek(target, offset + written, os.SEEK_SET)  # where sendfile would go on
    return written


def _existing(source: Manifest, target: Path) -> Manifest:
    if problems := verify_folder(target):
        raise VerificationError(
            "; ".join(map(str, problems)),
            expected="the milestone as it was made",
            where=f"milestones/{target.name}",
            action="choose another name; look at the disk; the damaged one is left as it is",
        )
    there = read_manifest(target)
    if there.root_sha256 != source.root_sha256:
        raise ConfigError(
            f"a milestone of step {there.step} has this name",
            expected=f"a name that is free, or the milestone of this step {source.step}",
            where=f"milestones/{target.name}",
            action="choose another name; milestones are permanent",
        )
    if not target.with_name(f"{target.name}.json").exists():
        _describe(source, target, "unknown")
    return there


class DamagedSource(VerificationError):
    """The checkpoint that was to be a milestone does not verify itself."""


def _bad_copy(source: Manifest, problems: list[Problem]) -> Exception:
    """Says whether the copy is bad or what it was made of."""
    own = verify_folder(source.folder)
    if own and not any(problem.unreachable for problem in own):
        return DamagedSource(
            "; ".join(map(str, own)),
            expected="a checkpoint whose every byte verifies",
            where=f"checkpoints/{source.folder.name}",
            action="make the milestone of another step; nothing was published",
        )
    return OSError(errno.EIO, f"the copy reads back wrong: {problems[0]}")


def _describe(source: Manifest, target: Path, method: str) -> None:
    values = {
        "name": target.name,
        "step": source.step,
        "root_sha256": source.root_sha256,
        "copied_from": f"{source.folder.parent.name}/{source.folder.name}",
        "method": method,
        "time": time.time(),
    }
    write_json_atomically(target.with_name(f"{target.name}.json"), values)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
