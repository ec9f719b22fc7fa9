# SPDX-License-Identifier: Apache-2.0
"""Resuming in layers that can each say no, and the report that says what was checked.

Bytes (only a checkpoint whose every file verifies is read), contract (`contract.py`), live state
(digests of what was loaded equal the manifest's on every rank), and behaviour: until its first
steps have shown that it goes on as it should, the run is on probation (`observation.py`).

A checkpoint saved on probation is provisional until its attempt is released. A launch after a kill
may go on from it, and its probation goes on too: band and retention are those of the checkpoint
that was released last. When an attempt is halted, the provisional ones since then are set aside.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from mprecipes.checkpoint.aside import choose, set_aside, steps_to_choose
from mprecipes.checkpoint.manager import CheckpointManager
from mprecipes.checkpoint.manifest import Manifest
from mprecipes.checkpoint.shelf import Shelf
from mprecipes.checkpoint.snapshot import describe_parameters, full_weights
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position
from mprecipes.errors import ResumeHalted
from mprecipes.resume.attempts import (
    adopted_from,
    doubt,
    facts_of_attempts,
    halted,
    refuse_to_end_before,
    released_base,
    was_chosen,
)
from mprecipes.resume.band import Band, make_band
from mprecipes.resume.checks import (
    Check,
    Report,
    bytes_check,
    digest_check,
    not_restored,
    stale_copies,
)
from mprecipes.resume.contract import ENVIRONMENT, Difference, check_accepted, check_contract
from mprecipes.resume.evidence import MEANINGS, Evidence
from mprecipes.resume.journal import StepRecord, read_journals
from mprecipes.resume.observation import Probation
from mprecipes.resume.policy import ProbationPolicy
from mprecipes.resume.replay import NOT_NUMERIC, Relation, Replay, relate, relation_between
from mprecipes.resume.showing import Announce
from mprecipes.resume.trial import Trial

_COMPARED = ("recipe", "precision", "topology", "data", "environment", "config")
_UNORDERED = Relation(frozenset({"this device adds in another order each time"}))

T = TypeVar("T")


class Run(Protocol):
    """What is used of `identity.run.RunFolder`."""

    path: Path
    run_id: str
    attempt: int

    @property
    def checkpoints(self) -> Path: ...
    @property
    def journal(self) -> Path: ...
    @property
    def resume_reports(self) -> Path: ...
    def record(self, **facts: Any) -> None: ...


@dataclass(frozen=True)
class Resumed:
    """Where the run goes on from.

    Attributes:
        manifest: of the checkpoint that was loaded; None for a start at step 0.
        rank_state: this rank's own state, to be restored last; {} without a checkpoint.
        differences: free and accepted changes, to be shown.
    """

    position: Position
    manifest: Manifest | None
    rank_state: dict[str, Any]
    probation: Probation
    differences: list[Difference]


def resume(
    *,
    run: Run,
    manager: CheckpointManager,
    ranks: Ranks,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    current: Mapping[str, Any],
    classes: Mapping[str, str],
    accepted: Collection[str],
    tolerance: float,
    evidence: Evidence | None = None,
    resume_from: int | None = None,
    is_deterministic: bool = True,
    announce: Announce = lambda *_: None,
) -> Resumed:
    """Collective: loads the newest checkpoint that verifies, or starts at step 0; on probation.

    Blocks while every byte of the checkpoint is read, once. The contract is checked from each
    candidate's manifest before live state is touched. `current` is noted in `run.json`, so that
    later attempts know how this one computed.

    Args:
        current: facts of this launch under a manifest's keys: `recipe`, `precision`, `topology`,
            `data`, `environment`, `config`; the model's parameters are read from `model`.
        classes: resume class per config option.
        accepted: values of `--accept`.
        tolerance: relative difference of losses of the precision mode, for a step that is replayed
            under another topology or environment.
        evidence: the rows of the five checks, with what is known already, and their policy.
        resume_from: the step to go on from; later checkpoints are set aside.
        is_deterministic: the same computation gives the same bits on this device.
        announce: told the verdict.

    Raises:
        NoTrustedCheckpoint: checkpoints exist and none verifies.
        ConfigError: `--accept` holds an unknown name, or there is no checkpoint of `resume_from`.
        ContractRefused: this launch is not the run that was interrupted.
        ResumeHalted: what was loaded is not what was saved.
    """
    check_accepted(accepted, classes)
    began = time.monotonic()
    evidence = evidence or Evidence(ProbationPolicy())
    current = {**current, **describe_parameters(full_weights(model))}
    plans: list[_Plan] = []
    _clear(run, resume_from, ranks)

    def check_manifest(manifest: Manifest | None) -> None:
        plan = _tried(lambda: _plan(run, manifest, current, classes, accepted), ranks.is_main)
        plans.append(ranks.main_first(*plan))
        if ranks.writes_here:
            run.record(**plans[-1].noted)

    manifest, rank_state = manager.restore_newest(check_manifest)
    found, seconds = plans[-1], time.monotonic() - began
    checks = [bytes_check(manifest, manager.refusals, manager.last_load, seconds), *found.checks]
    report = Report(_report_path(run, ranks, manifest), found.facts, checks)
    position, relation, changes = Position(), Relation(), tuple[str, ...]()
    if manifest is not None:
        counters = ("step", "updates", "samples_seen", "tokens_seen")
        position = Position(**{name: getattr(manifest, name) for name in counters})
        relation = relation_between(manifest.raw, current, classes)
        changes = tuple(
            str(each)
            for each in found.differences
            if each.field.startswith("environment.") and each.field not in NOT_NUMERIC
        )
        static = current["precision"].get("settings", {}).get("loss_scale")
        _check_state(manifest, manager, ranks, evidence, report, announce, static)
    if changes and ENVIRONMENT in accepted:  # its consequences for the numbers only warn
        relation |= (meant := Relation(flags=frozenset({ENVIRONMENT})))
        found.relations = {
            each: r | meant if any(name.startswith("environment.") for name in r.reasons) else r
            for each, r in found.relations.items()
        }
    if not is_deterministic:
        relation |= _UNORDERED
        found.relations = {each: r | _UNORDERED for each, r in found.relations.items()}
    trial = Trial(
        run.attempt, manifest, found.facts["base"], current["data"]["global_batch"],
        relation, tolerance, changes, accepted, found.band, found.earlier, ranks, announce,
    )  # fmt: skip
    replay = Replay(found.first_pass, found.relations, tolerance)
    probation = Probation(replay, report, manager, evidence, trial)
    return Resumed(position, manifest, rank_state, probation, found.differences)


def _check_state(
    manifest: Manifest,
    manager: CheckpointManager,
    ranks: Ranks,
    evidence: Evidence,
    report: Report,
    announce: Announce,
    static_scale: float | None,
) -> None:
    """Collective: what is in memory now, by the checks that own it."""
    check = digest_check(manifest, ranks, manager.model, manager.optimizer)
    wrong: dict[str, dict[str, str]] = check.found if check.verdict == "failed" else {}
    kinds = {*manifest.state_digests, *(kind for each in wrong.values() for kind in each)}
    evidence.note("weights", "files", "size and SHA-256 of every file", "as in the manifest",
                  agrees=True)  # fmt: skip
    for kind in sorted(kinds, key=lambda kind: (kind != "weights", kind)):
        expected = manifest.state_digests.get(kind)
        differ = {rank: d.get(kind) for rank, d in wrong.items() if d.get(kind) != expected}
        evidence.note(
            "weights" if kind == "weights" else "optimizer", f"digest of {kind} on every rank",
            expected, differ or expected, agrees=not differ,
            seconds=check.seconds if kind == "weights" else 0.0,
        )  # fmt: skip
    if (stale := stale_copies(ranks, manager.model)) is not None:
        cast = "the cast of the masters, bit for bit"
        evidence.note("weights", "working copies", cast, stale or cast, agrees=not stale)
    if manager.scaler is not None and manifest.raw["scaler"]:
        stored, live = manifest.raw["scaler"].get("scale"), manager.scaler.get_scale()
        evidence.note("data_order", "loss scale", static_scale or stored, live,
                      meaning="the loss scale was not restored")  # fmt: skip
    if fatal := evidence.fatal:
        owners = ", ".join(dict.fromkeys(failure.check for failure in fatal))
        evidence.settle()
        report.checks.extend(evidence.rows.values())
        report.write("halted")
        announce(report, "halted", {"resume/released": 0.0})
        if check.verdict == "failed":
            raise not_restored(check, manifest, owners)
        raise ResumeHalted(
            f"after loading {'; '.join(map(str, fatal))}",
            expected="what the manifest holds",
            where=f"checkpoints/{manifest.folder.name}/manifest.json, check {owners}",
            action=MEANINGS[fatal[0].check][1],
        )


def _writers_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """Collective: every rank gets what the one that writes on its disk found, or an error."""
    return ranks.writers_first(*_tried(work, ranks.writes_here))


def _tried(work: Callable[[], T], is_mine: bool) -> tuple[Exception | None, T | None]:
    try:
        return None, work() if is_mine else None
    except Exception as failure:  # noqa: BLE001 - raised again on every rank
        return failure, None


@dataclass
class _Plan:
    """What the main process found on disk, shared with every rank; `noted` is for run.json."""

    facts: dict[str, Any]
    noted: dict[str, Any]
    checks: list[Check]
    differences: list[Difference]
    first_pass: dict[int, StepRecord]
    relations: dict[int, Relation]
    band: Band | None
    earlier: tuple[int, ...]


def _plan(
    run: Run,
    manifest: Manifest | None,
    current: Mapping[str, Any],
    classes: Mapping[str, str],
    accepted: Collection[str],
) -> _Plan:
    """Main process only: reads what earlier attempts left, and checks the contract against it."""
    began = time.monotonic()
    history = read_journals(run.journal)
    first_pass = history.first_pass(run.attempt, without=halted(run.resume_reports))
    trained = {record.attempt for record in first_pass.values()}
    known = facts_of_attempts(run.path)
    if manifest is not None:
        stored: Mapping[str, Any] = manifest.raw
        where = f"checkpoints/{manifest.folder.name}/manifest.json"
    else:  # the newest attempt that trained says what this run is
        newest = max(trained, default=-1)
        stored, where = known.get(newest, current), f"run.json, attempt {newest}"
    published = {m.step for m in Shelf(run.checkpoints, run.path / "quarantine", "").scan()[0]}
    differences = check_contract(stored, current, classes, accepted, where=where)
    noted: dict[str, Any] = {"contract": {key: current[key] for key in _COMPARED}}
    step = base = 0
    if manifest is not None:
        noted |= adopted_from(manifest, run.path, run.run_id, is_trained=bool(trained))
        refuse_to_end_before(manifest, published, current["config"].get("max_steps"))
        step, base = manifest.step, released_base(manifest, run.resume_reports)
    environment = [d for d in differences if d.field.startswith("environment.")]
    contract = Check(
        "contract",
        "passed",
        policy="halt",
        expected=f"the settings of {where}" if trained or manifest else None,
        found=f"{len(differences) or 'nothing'} changed, each free or accepted",
        tolerance="exact",
        seconds=time.monotonic() - began,
        meaning="this launch is the run that was interrupted",
    )
    facts = {
        "attempt": run.attempt,
        "checkpoint": f"checkpoints/{manifest.folder.name}" if manifest else None,
        "step": step,
        "base": base,
        "environment_changes": [d.to_dict() for d in environment],
        "contract_changes": [d.to_dict() for d in differences if d not in environment],
        "torn_journal_lines": history.torn,
    }
    beyond = {number: record for number, record in first_pass.items() if number > step}
    relations = relate({a: known.get(a, stored) for a in trained}, current, classes)
    band = make_band([record for number, record in first_pass.items() if number <= base])
    earlier = tuple(sorted(number for number in published if number < step))
    return _Plan(facts, noted, [contract], differences, beyond, relations, band, earlier)


def _clear(run: Run, resume_from: int | None, ranks: Ranks) -> None:
    """Collective: sets aside what this launch is not to go on from."""
    reports, attempt = run.resume_reports, run.attempt

    def work() -> None:
        if resume_from is not None and not was_chosen(run.path, reports, resume_from):
            choose(run.path, run.checkpoints, resume_from, attempt=attempt, known=known)
            run.record(resume_from=resume_from)
        set_aside(run.path, run.checkpoints, doubt(reports), attempt=attempt)

    known: set[int] = set()
    if resume_from is not None:
        here = _writers_first(ranks, lambda: steps_to_choose(run.path, run.checkpoints))
        known = {step for each in ranks.gather(here) for step in each}
    _writers_first(ranks, work)


def _report_path(run: Run, ranks: Ranks, manifest: Manifest | None) -> Path | None:
    """Where this rank reports; a first attempt that found nothing has nothing to report."""
    if not ranks.writes_here or (run.attempt == 0 and manifest is None):
        return None
    return run.resume_reports / f"attempt-{run.attempt:04d}.json"
