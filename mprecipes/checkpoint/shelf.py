# SPDX-License-Identifier: Apache-2.0
"""The published checkpoints of a run on one disk: found, put aside, deleted; one process acts.

On disk: `checkpoints/step-00000500/` is published; `.staging-...` is being written and `.trash-...`
being deleted, both swept at the next start; `quarantine/step-00000500/` did not verify, and
`quarantine/step-00000500.reason.json` says why. A folder's name is no source of facts: the step is
the manifest's. A folder that neither is called `step-` and a number nor holds a manifest is
somebody else's.
"""

import logging
import os
import re
import shutil
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from mprecipes.checkpoint.manifest import NAME, Manifest, Problem, read_manifest, verify_folder
from mprecipes.checkpoint.problems import check_reachable
from mprecipes.errors import VerificationError
from mprecipes.faults import fault_point
from mprecipes.identity.files import fsync_directory, remove_unfinished, write_json_atomically

log = logging.getLogger(__name__)


def step_name(step: int) -> str:
    """Gives the name a checkpoint is published under."""
    return f"step-{step:08d}"


class RunFolderLike(Protocol):
    """What the checkpoint room needs to know of a run's folder."""

    @property
    def path(self) -> Path: ...
    @property
    def run_id(self) -> str: ...
    @property
    def checkpoints(self) -> Path: ...
    @property
    def quarantine(self) -> Path: ...
    @property
    def milestones(self) -> Path: ...


class Shelf:
    """The `checkpoints/` and `quarantine/` folders of a run; either may be absent.

    Attributes:
        counts: `quarantined`, `deleted` and `cleanup_errors`.
    """

    def __init__(self, checkpoints: Path, quarantine: Path, run_id: str) -> None:
        self.checkpoints, self.quarantine, self._run_id = checkpoints, quarantine, run_id
        self.counts: Counter[str] = Counter()

    def scan(self) -> tuple[list[Manifest], list[tuple[str, Problem]]]:
        """Gives the manifests, newest first, and the folders whose manifest cannot be read."""
        found: list[Manifest] = []
        broken: list[tuple[str, Problem]] = []
        for path in _folders(self.checkpoints):
            is_named = re.fullmatch(r"step-\d+", path.name)
            if not is_named and not os.path.lexists(path / NAME):
                continue
            try:
                found.append(read_manifest(path))
            except VerificationError as error:
                broken.append((path.name, Problem.of(error, NAME)))
        found.sort(key=lambda each: (-each.step, each.folder.name != step_name(each.step)))
        return found, broken

    def make_room(self, step: int, refuse: Problem | None = None) -> str | None:
        """Makes the empty staging folder of a step, unless the step is published: gives its name.

        What stands in the way and does not verify goes to quarantine; with `refuse` also what does.
        """
        for manifest in self.scan()[0]:
            if manifest.step == step:
                problems = [refuse] if refuse else verify_folder(manifest.folder)
                if not problems:
                    return manifest.folder.name
                self.set_aside(manifest.folder, problems)
        taken = self.checkpoints / step_name(step)
        if os.path.lexists(taken):
            self.set_aside(taken, [Problem(NAME, "damaged or of another step", f"step {step}")])
        if self.staging(step).exists():
            shutil.rmtree(self.staging(step))
        self.staging(step).mkdir(parents=True)
        return None

    def staging(self, step: int) -> Path:
        return self.checkpoints / f".staging-{step_name(step)}-{self._run_id}"

    def publish(self, step: int, name: str | None = None) -> Path:
        """Renames the staging folder into place, to its own name or another; makes that durable."""
        path = self.checkpoints / (name or step_name(step))
        self.staging(step).rename(path)
        fault_point("save.after_rename", step)
        fsync_directory(self.checkpoints)
        return path

    def set_aside(self, folder: Path, problems: list[Problem]) -> str:
        """Moves a folder to quarantine, says why beside it, and gives its name there.

        Raises:
            OSError: it could not be moved.
            CheckpointError: it could not be read, which does not make it bad; it stays.
        """
        check_reachable(folder.name, problems)
        self.quarantine.mkdir(parents=True, exist_ok=True)
        target, number = self.quarantine / folder.name, 1
        while os.path.lexists(target):
            number += 1
            target = self.quarantine / f"{folder.name}.{number}"
        fault_point("quarantine.before_move")
        folder.rename(target)
        fault_point("quarantine.after_move")
        fsync_directory(folder.parent)
        details = [asdict(problem) for problem in problems]
        for each in details:
            del each["unreachable"]  # see above
        reason = {"folder": folder.name, "time": time.time(), "problems": details}
        write_json_atomically(target.with_name(f"{target.name}.reason.json"), reason)
        self.counts["quarantined"] += 1
        text = "; ".join(map(str, problems))
        log.warning("%s is refused and now quarantine/%s: %s", folder.name, target.name, text)
        return target.name

    def quarantined(self) -> list[str]:
        """Gives the names of all folders in quarantine."""
        return [path.name for path in _folders(self.quarantine)]

    def delete(self, manifest: Manifest) -> bool:
        """Deletes a checkpoint, only under the name we gave it; False when it is still there.

        It is renamed first, so that no half deleted folder ever looks published. A failure is
        counted and logged and ends nothing. Fault points carry the step that is deleted.
        """
        path, step = manifest.folder, manifest.step
        if path.name != step_name(step):
            return False
        trash = path.with_name(f".trash-{path.name}-{self._run_id}")
        try:
            fault_point("retention.before_delete", step)
            path.rename(trash)
            fault_point("retention.after_rename", step)
        except OSError as error:
            self._cleanup_failed(path, error)
            return not path.exists()
        self.remove(trash)
        fault_point("retention.after_delete", step)
        self.counts["deleted"] += 1
        return True

    def sweep(self) -> None:
        """Removes what a dead process left half written or half deleted."""
        if self.checkpoints.is_dir():
            for path in sorted(self.checkpoints.iterdir()):
                if path.name.startswith((".staging-", ".trash-")):
                    fault_point("sweep.before_remove")
                    self.remove(path)
                    fault_point("sweep.after_remove")
        for folder in (self.checkpoints, self.quarantine):
            remove_unfinished(folder)

    def remove(self, path: Path) -> None:
        """Removes a folder that may be absent; a failure is counted and logged."""
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._cleanup_failed(path, error)

    def _cleanup_failed(self, path: Path, error: OSError) -> None:
        self.counts["cleanup_errors"] += 1
        log.warning("%s could not be removed (%s); the run goes on", path.name, error)


def _folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return [path for path in sorted(parent.iterdir()) if path.is_dir() and path.name[0] != "."]
