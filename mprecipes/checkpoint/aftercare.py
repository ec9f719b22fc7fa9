# SPDX-License-Identifier: Apache-2.0
"""What follows a published checkpoint: milestones, retention, mirror, scrubbing; on one process.

Everything is found out from what lies on the disk, so what a dead process left undone the next one
does: a checkpoint whose milestone could not be copied yet stays. Nothing here ever fails a run: an
error is counted, logged, and its work tried again after the next save.

On disk, beside the checkpoints: `checkpoints/evaluations.json` (step -> metric -> value, for
`keep_best`) and `checkpoints/step-00000500.pinned`, an empty file with which a person keeps a step.
"""

import json
import logging
import math
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from mprecipes.checkpoint import milestones
from mprecipes.checkpoint.abandoned import abandon, read_cuts
from mprecipes.checkpoint.manifest import Manifest
from mprecipes.checkpoint.milestones import DamagedSource, is_taken, make_milestone, read_milestones
from mprecipes.checkpoint.mirror import Mirror, Mirrored
from mprecipes.checkpoint.mirroring import PAUSES, Copy, Mirroring, Roots
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.checkpoint.retention import Decision, plan_retention
from mprecipes.checkpoint.scrub import Scrubber
from mprecipes.checkpoint.shelf import Shelf, step_name
from mprecipes.errors import ConfigError, RecipeError, VerificationError
from mprecipes.faults import fault_point
from mprecipes.identity.files import write_json_atomically

log = logging.getLogger(__name__)
DRAIN_SECONDS = 600.0
EVALUATIONS = "evaluations.json"


class RunFolderLike(Protocol):
    """What is used of a run's folder."""

    @property
    def path(self) -> Path: ...
    @property
    def checkpoints(self) -> Path: ...
    @property
    def quarantine(self) -> Path: ...
    @property
    def milestones(self) -> Path: ...


class Aftercare:
    """Keeps a run's published checkpoints as its policy says. Main process only.

    `published` runs on the thread that published, `freeze` and `release` on the training thread;
    mirror and scrubber have threads of their own, which start with the first call of `published`.

    Args:
        folder: the run's folder.
        run_id: its id.
        pauses: seconds before each further try to reach the mirror.

    Attributes:
        protected: steps that stay for now, such as the one this run resumed from.
        damaged: steps found not to verify; they neither count nor are deleted.
        keep_before: the step at which a loss spike began that is still open; the newest checkpoint
            from before it stays. None without one.

    Raises:
        ConfigError: the mirror's URL cannot be used here.
    """

    def __init__(
        self,
        folder: RunFolderLike,
        policy: CheckpointPolicy,
        run_id: str,
        *,
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        self._folder, self._policy = folder, policy
        self._shelf = Shelf(folder.checkpoints, folder.quarantine, run_id)
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._frozen, self._copying = False, ""
        self._named: dict[int, set[str]] = {}
        self._refused: set[tuple[str, str]] = set()
        self.protected: set[int] = set()
        self.damaged: set[int] = set()
        self.keep_before: int | None = None
        mirror = Mirror(policy.mirror, folder.path) if policy.mirror else None
        self._mirroring = mirror and Mirroring(
            mirror, run_id, next_copy=self._next_copy, surplus=self._surplus,
            earlier=self._run_ids, pauses=pauses,
            cuts=lambda: (read_cuts(folder.path), self._shelf.scan()[0]),
        )  # fmt: skip
        hours = policy.verify_every_hours
        self._scrubber = hours and Scrubber(folder.path, hours, mirror, self.damaged.add)

    @property
    def counts(self) -> Counter[str]:
        """What happened so far, by name: those of the parts, `milestones`, and errors of each."""
        total = self._counts + self._shelf.counts
        for part in (self._mirroring, self._scrubber):
            total += part.counts if part else Counter()
        return total

    def published(
        self,
        manifest: Manifest,
        milestone: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Does what follows a checkpoint; blocks for copying milestones and deleting, no longer.

        Args:
            milestone: name under which this checkpoint is also kept for good.
            metrics: values measured at its step, for `keep_best`.
        """
        fault_point("aftercare.begin", manifest.step)
        with self._lock:
            if milestone is not None:
                self._named.setdefault(manifest.step, set()).add(milestone)
            if metrics:
                self._note(manifest.step, metrics)
            self._attend()
        fault_point("aftercare.end", manifest.step)
        if self._scrubber:
            self._scrubber.start()

    def freeze(self) -> None:
        """Deletes nothing from here on, here and at the mirror, until `release`.

        What is saved meanwhile as provisional becomes no milestone and is not mirrored either.
        """
        with self._lock:
            self._frozen = True

    def release(self) -> None:
        """Lets retention run again, and runs it; blocks for what it deletes."""
        with self._lock:
            self._frozen = False
            self._attend()

    def plan(self) -> list[Decision]:
        """Gives what retention would do now, oldest first; changes nothing."""
        with self._lock:
            return self._plan([each.step for each in self._rolling()])

    def retain(self) -> list[Decision]:
        """Deletes what the plan gives up, and gives the plan; a failure is counted and logged."""
        with self._lock:
            rolling = {manifest.step: manifest for manifest in self._rolling()}
            plan = self._plan(list(rolling))
            for decision in plan:
                if not decision.keep:
                    self._shelf.delete(rolling[decision.step])
            return plan

    def sweep(self) -> None:
        """Removes what a dead process left half copied; call it under the lease."""
        milestones.sweep(self._folder.milestones)

    def idle(self) -> bool:
        """True when nothing is being copied to the mirror or scrubbed."""
        return all(part.is_idle for part in (self._mirroring, self._scrubber) if part)

    def close(self, drain: bool = True, seconds: float = DRAIN_SECONDS) -> None:
        """Ends the threads; with `drain` after the mirror is up to date or `seconds` have passed.

        What is not copied then is copied by the next launch.
        """
        if self._scrubber:
            self._scrubber.close()
        if drain:
            with self._lock:
                self._attend()
        if self._mirroring:
            self._mirroring.close(drain=drain, seconds=seconds)

    def _attend(self) -> None:
        """Milestones, then retention, then word to the mirror; errors stay here."""
        try:
            self._make_milestones()
            if not self._frozen:
                self.retain()
            abandon(self._folder.path, [], kept=self._rolling())  # made again, bit for bit
        except Exception as error:  # noqa: BLE001 - a run must not end because of its leftovers
            self._counts["aftercare_errors"] += 1
            log.warning("keeping checkpoints: %s; the run goes on", error)
        if self._mirroring:
            self._mirroring.wake()

    def _rolling(self) -> list[Manifest]:
        """The published checkpoints under the names we gave them, newest first."""
        found = self._shelf.scan()[0]
        return [manifest for manifest in found if manifest.folder.name == step_name(manifest.step)]

    def _settled(self) -> list[Manifest]:
        """The checkpoints that wait for no verdict on a resume."""
        waiting = self._frozen
        return [m for m in self._rolling() if not (waiting and m.raw.get("provisional"))]

    def _plan(self, steps: list[int], damaged: set[int] | None = None) -> list[Decision]:
        waiting = {manifest.step: name for manifest, name in self._missing_milestones()}
        reasons = dict.fromkeys(set(self.protected), "this run resumed from it")
        reasons |= {step: f"milestone {name} is not copied yet" for step, name in waiting.items()}
        if found := re.fullmatch(r"checkpoints/step-(\d+)", self._copying):
            reasons[int(found[1])] = "being copied to the mirror"
        if (spike := self.keep_before) is not None:
            older = [step for step in steps if step < spike and step not in self.damaged]
            reasons |= {max(older): "from before an open loss spike"} if older else {}
        return plan_retention(
            steps,
            self._policy,
            evaluations=self._evaluations(),
            pinned=pinned_steps(self._folder.checkpoints),
            protected=reasons,
            damaged=set(self.damaged) if damaged is None else damaged,
        )

    def _missing_milestones(self) -> list[tuple[Manifest, str]]:
        """The checkpoints that are to be milestones and are not, each with the name."""
        there = read_milestones(self._folder.milestones)
        missing = []
        for manifest in self._settled():
            names = set(self._named.get(manifest.step, ()))
            names |= {manifest.milestone} if manifest.milestone else set()
            if manifest.step in self._policy.milestone_steps:
                names.add(step_name(manifest.step))
            for name in sorted(names):
                if is_taken(self._folder.milestones / name, there.get(name), manifest):
                    name = f"{name}-{step_name(manifest.step)}"
                copied = name in there and there[name].root_sha256 == manifest.root_sha256
                if not copied and (name, manifest.root_sha256) not in self._refused:
                    missing.append((manifest, name))
        return missing

    def _make_milestones(self) -> None:
        for manifest, name in self._missing_milestones():
            try:
                make_milestone(manifest, self._folder.milestones, name)
                self._counts["milestones"] += 1
            except RecipeError as error:
                self._counts["milestone_errors"] += 1
                log.warning("milestone %s of step %d: %s", name, manifest.step, error)
                if isinstance(error, DamagedSource):
                    self.damaged.add(manifest.step)
                if isinstance(error, VerificationError | ConfigError):
                    self._refused.add((name, manifest.root_sha256))  # trying again changes nothing

    def _next_copy(self, there: Roots) -> Copy | None:
        """What the mirror misses, newest first; it stays until the next call."""
        with self._lock:
            named = read_milestones(self._folder.milestones).items()
            wanted: list[Copy] = [("milestones", name, each) for name, each in named]
            wanted += [("checkpoints", each.folder.name, each) for each in self._settled()]
            self._copying = ""
            for kind, name, manifest in sorted(wanted, key=lambda copy: (-copy[2].step, copy[:2])):
                root = there.get((kind, name))
                taken = kind == "milestones" and root not in (None, manifest.root_sha256)
                if taken and (name, manifest.root_sha256) not in self._refused:
                    self._refused.add((name, manifest.root_sha256))
                    self._counts["mirror_errors"] += 1
                    log.warning("the mirror has another milestone %s, which stays", name)
                doubtful = kind == "checkpoints" and manifest.step in self.damaged
                if not taken and not doubtful and root != manifest.root_sha256:
                    self._copying = f"{kind}/{name}"
                    return kind, name, manifest
            return None

    def _surplus(self, rolling: Sequence[Mirrored]) -> list[Mirrored]:
        """What the same plan gives up at the mirror, and what is abandoned; nothing kept here."""
        with self._lock:
            if self._frozen:
                return []
            here = {manifest.step for manifest in self._rolling()}
            known = [(each.manifest.step, each) for each in rolling if each.manifest]
            steps = {step: each for step, each in known if not each.abandoned}
            plan = self._plan(list(steps), damaged=set())
            gone = [each.step for each in plan if not each.keep and each.step not in here]
            stay = pinned_steps(self._folder.checkpoints)
            void = [each for step, each in known if steps and each.abandoned and step not in stay]
            return [*(steps[step] for step in gone), *void]

    def _run_ids(self) -> set[str]:
        with self._lock:
            kept = [*self._shelf.scan()[0], *read_milestones(self._folder.milestones).values()]
            return {manifest.run_id for manifest in kept}

    def _evaluations(self) -> dict[int, dict[str, float]]:
        try:
            text = (self._folder.checkpoints / EVALUATIONS).read_text(encoding="utf-8")
            return {int(step): dict(values) for step, values in json.loads(text).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            log.warning("%s cannot be read (%s); no best is known", EVALUATIONS, error)
            return {}

    def _note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds what was measured at a step; of steps that are gone nothing is kept."""
        steps = {manifest.step for manifest in self._rolling()} | {step}
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        values = {**self._evaluations(), step: finite}
        kept = {str(each): values[each] for each in sorted(steps & values.keys())}
        fault_point("aftercare.before_note", step)
        try:
            write_json_atomically(self._folder.checkpoints / EVALUATIONS, kept)
            fault_point("aftercare.after_note", step)
        except OSError as error:
            self._counts["aftercare_errors"] += 1
            log.warning("%s of step %d is not written (%s)", EVALUATIONS, step, error)


def pin_path(checkpoints: Path, step: int) -> Path:
    """Gives the marker whose existence keeps the checkpoint of a step."""
    return checkpoints / f"{step_name(step)}.pinned"


def pinned_steps(checkpoints: Path) -> set[int]:
    """Gives the steps that a person keeps."""
    names = [path.name for path in checkpoints.glob("step-*.pinned")]
    found = (re.fullmatch(r"step-(\d+)\.pinned", name) for name in names)
    return {int(match[1]) for match in found if match}
