# SPDX-License-Identifier: Apache-2.0
"""A recipe's one call to go on from where the run is, with everything that must come before it."""

import contextlib
import inspect
import json
import time
from pathlib import Path
from typing import Any

import torch

from mprecipes.checkpoint.manager import CheckpointManager
from mprecipes.compute.collectives import try_collectives
from mprecipes.compute.launch import Launch
from mprecipes.compute.randomness import restore_random_state
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position
from mprecipes.data.packing import PreparedData
from mprecipes.errors import ConfigError, ResumeHalted
from mprecipes.identity.config import Origins, config_to_dict, resume_classes
from mprecipes.identity.environment import describe_environment
from mprecipes.identity.history import read_run_file
from mprecipes.identity.run import RunFolder
from mprecipes.resume.checks import Report, live_digests
from mprecipes.resume.evidence import MEANINGS, Evidence
from mprecipes.resume.guard import without_skipped
from mprecipes.resume.observation import Probation
from mprecipes.resume.policy import ProbationPolicy
from mprecipes.resume.probation import Resumed, resume
from mprecipes.resume.showing import Announce, Tracker, announcer, ways_on
from mprecipes.resume.trial import judge_collectives

SHARED_WITHIN_SECONDS = 10


def run_facts(run: RunFolder, launch: Launch, data: PreparedData, config: Any) -> dict[str, Any]:
    """Gives what manifests record of this launch, and what a later launch is compared with.

    Args:
        config: the recipe's resolved config, with a `seed`.

    Returns:
        `recipe`, `precision`, `topology`, `data`, `environment` and `config` as JSON values; no
        absolute path.
    """
    classes = resume_classes(type(config))
    return {
        "recipe": run.recipe.to_dict(),
        "precision": launch.measured["precision"],
        "topology": launch.measured["topology"],
        "data": {
            **{name: _without_place(value) for name, value in data.facts.items()},
            "seed": config.seed,
            "global_batch": launch.plan.global_batch,
            "micro_batch": launch.plan.micro_batch,
        },
        "environment": describe_environment(Path(inspect.getfile(type(config)))),
        "config": {  # only options that no resume is judged by are shortened
            name: _without_place(value) if classes[name] == "free" else value
            for name, value in config_to_dict(config).items()
        },
    }


def _without_place(value: Any) -> Any:
    """Shortens an absolute path to `.../name`: a checkpoint is read on other machines, after moves.

    The whole path is in the run folder's `config.yaml`.
    """
    if isinstance(value, list):
        return [_without_place(each) for each in value]
    if isinstance(value, dict):
        return {_without_place(name): _without_place(each) for name, each in value.items()}
    is_place = isinstance(value, str) and Path(value).is_absolute()
    return f".../{Path(value).name}" if is_place else value


def resume_run(
    run: RunFolder,
    launch: Launch,
    manager: CheckpointManager,
    facts: dict[str, Any],
    config: Any,
    origins: Origins,
    policy: ProbationPolicy | None = None,
    tracking: Tracker | None = None,
) -> tuple[Position, Probation]:
    """Collective: makes the live state the newest trusted one and says where the run goes on.

    In a second attempt the collectives are tried first, so that a hang is told within their limit.
    Random streams are restored last: call it when everything is built and nothing iterates yet.
    A rank that the saving launch did not have keeps the streams `seed_everything` gave it.

    Args:
        facts: of `run_facts`.
        config: the recipe's config, whose options say which of them may differ.
        origins: of `parse_config`; the changes its `accepted` names are allowed, and the step its
            `resume_from` names is gone on from.
        policy: of `probation_policy`.
        tracking: gets the verdict, when it is known, and the report.

    Raises:
        NoTrustedCheckpoint, ConfigError, ContractRefused, ResumeHalted: see `resume`.
    """
    _check_shared(run, launch.ranks)
    manager.sweep()
    manager.on_published = lambda name: run.record(checkpoint=name)
    evidence, announce = Evidence(policy or ProbationPolicy()), announcer(run.run_id, tracking)
    if run.attempt > 0:
        _try_collectives(run, launch, evidence, announce)
    device = launch.device.type
    resumed = resume(
        run=run,
        manager=manager,
        ranks=launch.ranks,
        model=manager.model,
        optimizer=manager.optimizer,
        current=facts,
        classes=resume_classes(type(config)),
        accepted=(*origins.accepted, *launch.descent.accepted),
        tolerance=launch.precision.replay_tolerance,
        evidence=evidence,
        resume_from=origins.resume_from,
        is_deterministic=device == "cpu" or torch.are_deterministic_algorithms_enabled(),
        announce=announce,
    )
    if resumed.manifest is None:
        digests = live_digests(launch.ranks, manager.model, manager.optimizer)
        run.record(initial_weights=digests[0]["weights"])  # of runs that are compared the same
    position = without_skipped(resumed.position, resumed.manifest, run.journal, launch.ranks)
    run.step = position.step  # where it ends when it ends before its first step
    if resumed.rank_state:
        restore_random_state(resumed.rank_state["random"], launch.device)
    if launch.is_main:
        with contextlib.suppress(OSError):  # a console that is gone stops no run
            told = _story(run, resumed, config.max_steps)
            for line in (*launch.descent.story(), *told, manager.stop_takes()):
                if line is not None:
                    print(line, flush=True)
    return position, resumed.probation


def _check_shared(run: RunFolder, ranks: Ranks) -> None:
    """Collective: refuses a run folder that not every rank sees, or not every rank of a node.

    Raises:
        ConfigError: naming the ranks, which are on machines with a disk of their own.
    """
    deadline = time.monotonic() + SHARED_WITHIN_SECONDS  # a network disk may show a file late
    while not (sees := _sees(run)) and time.monotonic() < deadline:
        time.sleep(0.5)
    if blind := [str(rank) for rank, each in enumerate(ranks.gather(sees)) if not each]:
        raise ConfigError(
            f"the run folder of rank 0 is not the one that rank {', '.join(blind)} sees",
            expected="one folder on a disk that all machines share",
            where=f"output_dir {run.path}",
            action="choose an --output_dir on a shared disk; or, for a folder on each node's own "
            "disk, --checkpoint '{\"on_each_node\": true}'",
        )


def _sees(run: RunFolder) -> bool:
    try:
        found = json.loads((run.path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found.get("run_id") == run.run_id)


def _try_collectives(
    run: RunFolder, launch: Launch, evidence: Evidence, announce: Announce
) -> None:
    """Collective, unless the others do not answer: the error is then this rank's own."""
    answers = try_collectives(launch.ranks, launch.device, evidence.policy.communication_seconds)
    hangs = [answer for answer in answers if answer.hangs]
    by_rank = [answers] if hangs else launch.ranks.gather(answers)
    if by_rank[0]:
        judge_collectives(evidence, by_rank)
    wrong = [failure for failure in evidence.failures if hangs or failure.halts]
    if not wrong:
        return
    evidence.settle()
    facts = {"attempt": run.attempt, "checkpoint": None, "step": 0, "base": 0}
    path = run.resume_reports / f"attempt-{run.attempt:04d}.json" if run.writes_here else None
    report = Report(path, facts, list(evidence.rows.values()))
    report.write("halted")
    announce(report, "halted", {"resume/released": 0.0})
    raise ResumeHalted(
        f"rank {launch.ranks.rank} asked the others: {'; '.join(map(str, wrong))}. Usually: "
        f"{MEANINGS['communication'][0]}",
        expected=f"known answers within {evidence.policy.communication_seconds:g} s",
        where="check communication, before anything was loaded",
        action=MEANINGS["communication"][1] + ways_on(run.attempt, (), environment=False),
    )


def _story(run: RunFolder, resumed: Resumed, max_steps: int) -> list[str]:
    """What a person should know before the first step."""
    if resumed.manifest is None and run.attempt == 0:
        return []
    lines = [f"attempt {run.attempt}: no checkpoint yet, started at step 0"]
    if resumed.manifest is not None:
        name = resumed.manifest.folder.name
        lines = [f"attempt {run.attempt}: resumed from {name}, every file verified"]
    if (lost := _lost(run, resumed.position.step)) is not None:
        lines.append(
            f"{lost} was published and is not here: put its folder back into checkpoints/ and "
            "launch again, or go on from what is"
        )
    if resumed.position.step == max_steps:
        lines.append(f"all {max_steps} steps were made: what follows the last one is done now")
    elif due := resumed.probation.num_due:
        lines.append(f"on probation: {due} steps are compared with their first pass")
    elif resumed.probation.on_probation:
        lines.append(f"on probation: {resumed.probation.num_observed} steps are observed")
    return lines + [f"changed: {difference}" for difference in resumed.differences]


def _lost(run: RunFolder, step: int) -> str | None:
    """What was published last, if it is beyond `step` and neither here nor in quarantine."""
    attempts = (read_run_file(run.path) or {"attempts": []})["attempts"]
    names = [entry["checkpoint"] for entry in attempts if entry.get("checkpoint")]
    if not names or int(names[-1].removeprefix("step-")) <= step:
        return None
    known = (run.checkpoints / names[-1]).exists() or any(run.quarantine.glob(f"{names[-1]}*"))
    return None if known else str(names[-1])
