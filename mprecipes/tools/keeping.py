# SPDX-License-Identifier: Apache-2.0
"""What people do to a run's checkpoints by hand: prune, pin, make milestones, verify everything.

What a run's policy is, is read from the options its newest attempt kept in its folder.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mprecipes.checkpoint.aftercare import Aftercare, pin_path, pinned_steps
from mprecipes.checkpoint.manifest import Manifest, verify_folder
from mprecipes.checkpoint.milestones import check_name, make_milestone
from mprecipes.checkpoint.mirror import Mirror
from mprecipes.checkpoint.policy import CheckpointPolicy, policy_of
from mprecipes.checkpoint.retention import Decision
from mprecipes.checkpoint.scrub import scrub_mirror
from mprecipes.checkpoint.shelf import Shelf, step_name
from mprecipes.errors import ConfigError, RunFolderBusy
from mprecipes.identity.history import read_run
from mprecipes.identity.lease import read_holder
from mprecipes.identity.values import Refused, check_value, read_yaml
from mprecipes.tools.resume_report import report_files
from mprecipes.tools.verify import Verdict, verify_path


@dataclass(frozen=True)
class Places:
    """The parts of a run folder that keeping checkpoints needs."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    @property
    def milestones(self) -> Path:
        return self.path / "milestones"


@dataclass(frozen=True)
class Pruned:
    """What became, or would become, of one checkpoint."""

    step: int
    keep: bool
    reason: str
    num_bytes: int
    deleted: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def policy_of_run(run: Path) -> CheckpointPolicy:
    """Gives the policy of the newest attempt; the defaults where it kept no options.

    Raises:
        ConfigError: its options cannot be read.
    """
    files = sorted(run.glob("config*.yaml"), key=_attempt_of)
    values = {name: value for name, (value, _) in read_yaml(files[-1]).items()} if files else {}
    kinds = {"save_steps": int, "keep_last": int, "checkpoint": dict[str, Any] | None}
    try:
        found = {name: check_value(values[name], kinds[name]) for name in kinds if name in values}
    except Refused as error:
        raise ConfigError(
            error.found, expected=error.expected, where=str(files[-1]), action=error.action
        ) from None
    return policy_of(found.pop("checkpoint", None), **found)


def prune(run: Path, *, dry_run: bool, keep_last: int | None = None) -> list[Pruned]:
    """Deletes what the run's retention plan gives up, and gives the plan, oldest first.

    The newest that stays is verified before anything older is deleted: one that is damaged does not
    count. Steps of a resume that is not released stay.

    Args:
        dry_run: delete nothing.
        keep_last: in place of the run's own.

    Raises:
        ConfigError: no run folder, or a number that is not allowed.
        RunFolderBusy: the run is going on; it prunes itself.
    """
    info = read_run(run)
    if not dry_run:
        _refuse_live(run)
    policy = replace(policy_of_run(run), mirror=None, verify_every_hours=None)
    if keep_last is not None:
        policy = replace(policy, keep_last=keep_last)
    places = Places(run)
    aftercare = Aftercare(places, policy, info.run_id)
    aftercare.protected |= _on_probation(run)
    aftercare.keep_before = _open_spike(places)
    shelf = Shelf(places.checkpoints, places.quarantine, info.run_id)
    found = {
        each.step: each for each in shelf.scan()[0] if each.folder.name == step_name(each.step)
    }
    plan = _verified_plan(aftercare, found)
    if not dry_run:
        _refuse_live(run)
        aftercare.retain()
    return [
        Pruned(
            each.step, each.keep, each.reason,
            sum(entry.bytes for entry in found[each.step].files),
            not found[each.step].folder.exists(),
        )
        for each in plan
    ]  # fmt: skip


def name_milestone(run: Path, step: int, name: str) -> Manifest:
    """Copies the checkpoint of a step to the run's milestones, also while the run is going on.

    Raises:
        ConfigError: no such run or step, or the name is not allowed or taken.
        VerificationError: the checkpoint is damaged.
        CheckpointError: the copy could not be made.
    """
    check_name(name)
    with _pinned(run, step):
        return make_milestone(_checkpoint_of(run, step), run / "milestones", name)


def pin(run: Path, step: int, *, release: bool) -> bool:
    """Keeps the checkpoint of a step until it is released; gives whether that changed anything.

    Raises:
        ConfigError: no such run or step.
    """
    read_run(run)
    marker = pin_path(run / "checkpoints", step)
    if release:
        there = marker.exists()
        marker.unlink(missing_ok=True)
        return there
    _checkpoint_of(run, step)
    there = marker.exists()
    marker.touch()
    return not there


def verify_all(run: Path) -> list[Verdict]:
    """Verifies every checkpoint and milestone of a run, and everything in its mirror.

    Raises:
        ConfigError: no run folder, or a mirror that cannot be used here.
    """
    read_run(run)
    url = policy_of_run(run).mirror
    verdicts = verify_path(run)
    for found in scrub_mirror(Mirror(url, run)) if url else ():
        verdicts.append(
            Verdict(
                Path(found.place), found.kind, found.step, found.num_files, found.num_bytes,
                found.seconds, found.problems, found.place,
            )
        )  # fmt: skip
    return verdicts


def _verified_plan(aftercare: Aftercare, found: dict[int, Manifest]) -> list[Decision]:
    """The plan once the newest that it keeps is known to verify; nothing to delete needs none."""
    while True:
        plan = aftercare.plan()
        good = [each.step for each in plan if each.keep and each.step not in aftercare.damaged]
        if all(each.keep for each in plan) or not good:
            return plan
        if not verify_folder(found[good[-1]].folder):
            return plan
        aftercare.damaged.add(good[-1])


def _checkpoint_of(run: Path, step: int) -> Manifest:
    info, places = read_run(run), Places(run)
    found = Shelf(places.checkpoints, places.quarantine, info.run_id).scan()[0]
    for manifest in found:
        if manifest.step == step:
            return manifest
    steps = ", ".join(str(manifest.step) for manifest in found)
    raise ConfigError(
        f"no checkpoint of step {step}",
        expected=f"one of {steps}" if steps else "a run that has checkpoints",
        where=f"{run}/checkpoints",
        action="see: mprecipes prune RUN --dry_run",
    )


@contextmanager
def _pinned(run: Path, step: int) -> Iterator[None]:
    """Keeps a running run's retention away from the step."""
    folder = run / "checkpoints"
    ours = folder.is_dir() and step not in pinned_steps(folder)
    if ours:
        pin_path(folder, step).touch()
    try:
        yield
    finally:
        if ours:
            pin_path(folder, step).unlink(missing_ok=True)


def _refuse_live(run: Path) -> None:
    holder = read_holder(run)
    if holder is not None and holder.is_live:
        raise RunFolderBusy(
            f"{holder} is running here, last heartbeat {holder.age_seconds:.0f} s ago",
            expected="a run that is not going on; one that is prunes itself",
            where=str(run),
            action="wait for its end, or see its plan with --dry_run",
        )


def _on_probation(run: Path) -> set[int]:
    """Where a resume without a good verdict went on from: its step, and the one released last.

    Raises:
        ConfigError: the newest report cannot be read; what it keeps is then unknown.
    """
    reports = report_files(run)
    if not reports:
        return set()
    try:
        report = json.loads(reports[-1][1].read_text(encoding="utf-8"))
        verdict, step = report["verdict"], int(report["step"])
        base = int(report.get("base", step))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"a resume report that cannot be read ({type(error).__name__}: {error})",
            expected="the verdict and the step that the run wrote: they say what must stay",
            where=str(reports[-1][1]),
            action="put back a copy of it; move it away only if its attempt was released",
        ) from None
    return set() if str(verdict).startswith("released") else {step, base}


def _open_spike(places: Places) -> int | None:
    """The first step of a loss spike that the newest checkpoint was made in; None without one."""
    newest = Shelf(places.checkpoints, places.quarantine, "").scan()[0][:1]
    since = (newest[0].raw.get("guard") or {}).get("since") if newest else None
    return int(since[0]) if since else None


def _attempt_of(path: Path) -> int:
    """The number in `config.attempt-12.yaml` or `attempt-0012.json`; 0 without one."""
    found = re.search(r"attempt-(\d+)", path.name)
    return int(found[1]) if found else 0
