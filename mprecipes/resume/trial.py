# SPDX-License-Identifier: Apache-2.0
"""What a resumed run is measured by, and the comparisons its five checks make.

Each function notes facts in the evidence, alike on every rank; none ends a run.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mprecipes.checkpoint.manifest import Manifest
from mprecipes.compute.collectives import Answer, network_counters, network_problems
from mprecipes.compute.ranks import Ranks
from mprecipes.resume.band import Band, outside
from mprecipes.resume.evidence import Evidence, within
from mprecipes.resume.journal import StepRecord
from mprecipes.resume.probe import cosine
from mprecipes.resume.rates import judge, slow_ranks
from mprecipes.resume.replay import WARNED, Relation
from mprecipes.resume.showing import Announce

FEWEST = 3  # observed steps that are judged together


@dataclass(frozen=True)
class Trial:
    """What a resumed run is measured by.

    Attributes:
        manifest: of the checkpoint that was loaded; None for a start at step 0.
        base: the step whose checkpoint was last released: the manifest's own, or an earlier one
            where this one was saved on probation.
        relation: of this launch to the one that saved.
        tolerance: relative difference of a loss that the precision mode allows across environments.
        environment: what differs in it, as old -> new.
        accepted: values of `--accept`.
        earlier: steps of checkpoints before this one.
        announce: told the verdict and the report's rows, main process only.
        numbers: measured so far, by metric name.
    """

    attempt: int
    manifest: Manifest | None = None
    base: int = 0
    global_batch: int = 0
    relation: Relation = Relation()
    tolerance: float = 0.0
    environment: tuple[str, ...] = ()
    accepted: Collection[str] = ()
    band: Band | None = None
    earlier: tuple[int, ...] = ()
    ranks: Ranks = field(default_factory=Ranks)
    announce: Announce = lambda *_: None
    network: Callable[[], dict[str, int]] = network_counters
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def start(self) -> int:
        """The step it goes on from."""
        return self.manifest.step if self.manifest else 0

    @property
    def probe(self) -> dict[str, Any]:
        """The probe that was stored at the save; {} without one."""
        return (self.manifest.raw.get("probe") if self.manifest else None) or {}

    @property
    def throughput(self) -> dict[str, Any] | None:
        """Tokens per second before the save; None where too few steps were made."""
        return self.manifest.raw.get("throughput") if self.manifest else None

    @property
    def drift_is_small(self) -> bool | None:
        """Whether the measured drift is inside the mode's profile; None if none was measured."""
        drift = self.numbers.get("resume/probe_loss_difference")
        angle = self.numbers.get("resume/probe_cosine", 0.0)
        return None if drift is None else drift <= self.tolerance >= 1.0 - angle


def judge_collectives(evidence: Evidence, by_rank: Sequence[Sequence[Answer]]) -> None:
    """Notes what every rank got from each collective."""
    for number, answer in enumerate(by_rank[0]):
        each = [answers[number] for answers in by_rank if number < len(answers)]
        wrong = {f"rank {rank}": a.problem for rank, a in enumerate(each) if a.problem}
        evidence.note(
            "communication", answer.name, "the known answer on every rank",
            wrong or f"in {max(a.seconds for a in each):.4f} s", agrees=not wrong,
            tolerance="exact; within communication_seconds", seconds=answer.seconds,
            meaning="the processes do not reach each other, or what they send is changed",
        )  # fmt: skip


def compare_replicas(evidence: Evidence, digests: Sequence[str]) -> None:
    """Notes whether every rank has the same gradient of the probe."""
    wrong = {f"rank {rank}": d for rank, d in enumerate(digests) if d != digests[0]}
    evidence.note(
        "communication", "probe gradient on every rank", digests[0], wrong or digests[0],
        agrees=not wrong,
        meaning="the reduction of gradients gives ranks different sums",
    )  # fmt: skip


def compare_probe(evidence: Evidence, trial: Trial, found: Mapping[str, Any]) -> None:
    """Notes how the repeated probe differs from the stored one, and measures the drift."""
    relation, stored = trial.relation, trial.probe
    reasons = ", ".join(sorted(relation.reasons))
    limit = trial.tolerance if relation.reasons else 0.0
    text = f"{limit} relative ({reasons})" if reasons else "bitwise: computed as at the save"
    loss, norm = ([float.fromhex(s[n]) for s in (stored, found)] for n in ("loss", "grad_norm"))
    angle, only_warns = cosine(stored["sketch"], found["sketch"]), bool(relation.flags & WARNED)
    drift = abs(loss[1] - loss[0]) / max(abs(loss[0]), 1e-30)
    if ranks := min(len(stored.get("random", [])), len(found.get("random", []))):
        evidence.note(
            "data_order", "random streams", stored["random"][:ranks], found["random"][:ranks],
            meaning="random streams were not restored, or another rank's were",
        )  # fmt: skip
    sides = stored["batch_digest"], found["batch_digest"]
    if "batch_digest" not in relation.freed and not evidence.note(
        "data_order", "probe batch", *sides
    ):
        return  # another batch has another loss
    if "loss" in relation.freed:
        return
    trial.numbers["resume/probe_loss_difference"] = drift
    trial.numbers["resume/probe_cosine"] = angle
    evidence.note(
        "optimizer", "probe loss", *loss, agrees=within(loss[0], loss[1], limit), tolerance=text,
        only_warns=only_warns,
        meaning="same weights, same batch, another loss: dropout, precision or arithmetic changed",
    )  # fmt: skip
    bits = stored["matmul_bits"], found["matmul_bits"]
    evidence.note(
        "communication", "bits of an FP32 matmul", *bits,
        agrees=bits[0] == bits[1] or bool(trial.environment and trial.drift_is_small),
        only_warns=only_warns,
        meaning="the precision of FP32 matrix products was changed behind the run's back",
    )  # fmt: skip
    same = stored["grad_digest"] == found["grad_digest"]
    evidence.note(
        "communication", "probe gradient",
        {"grad_norm": norm[0], "digest": stored["grad_digest"], "cosine": 1.0},
        {"grad_norm": norm[1], "digest": found["grad_digest"], "cosine": angle},
        agrees=same or (limit > 0 and 1.0 - angle <= limit),
        only_warns=only_warns,
        tolerance=f"1 - cosine at most {text}" if limit else text,
        meaning="gradients are reduced or computed otherwise than at the save, such as in 16 bit",
    )  # fmt: skip


def judge_environment(evidence: Evidence, trial: Trial, num_replayed: int) -> None:
    """Another environment passes when accepted, or when the drift it causes was measured as small.

    Without a probe, steps that were replayed within the tolerance count as the measure.
    """
    measured: dict[str, Any] = {n.partition("/")[2]: v for n, v in trial.numbers.items()}
    accepted = "changed_environment" in trial.accepted
    inside = trial.drift_is_small
    if inside is None:
        measured, inside = {"replayed steps within tolerance": num_replayed}, num_replayed > 0
    evidence.note(
        "communication", "environment",
        "as at the save, or --accept changed_environment, or a small measured drift",
        {"changes": list(trial.environment), "drift": measured, "accepted": accepted},
        agrees=accepted or inside,
        tolerance=f"loss {trial.tolerance} relative and 1 - cosine {trial.tolerance}: numeric "
        "profile of the precision mode",
        meaning="the environment changed (driver, GPU model, library) and the numbers with it",
    )  # fmt: skip


def judge_band(evidence: Evidence, trial: Trial, steps: Sequence[StepRecord]) -> None:
    """Notes whether steps without a first pass are what the steps before the save allow."""
    if trial.band is None or len(steps) < FEWEST or trial.relation.flags:
        return
    problems = outside(trial.band, steps)
    low, high = trial.band.loss(steps[len(steps) // 2].step)
    norms = "{:.6g} to {:.6g}".format(*trial.band.grad_norm)
    evidence.note(
        "optimizer", "loss and grad_norm of steps without a first pass",
        f"loss in {low:.6g} to {high:.6g}, grad_norm in {norms}",
        "; ".join(problems) or f"{len(steps)} steps inside",
        agrees=not problems, tolerance=trial.band.formula,
    )  # fmt: skip


def judge_throughput(
    evidence: Evidence, trial: Trial, rates: Sequence[float], forward: Sequence[float]
) -> None:
    """Notes whether the observed steps are as fast as before the save, and which ranks are slow."""
    tolerance = evidence.policy.throughput_tolerance
    if trial.relation.reasons:
        reasons = ", ".join(sorted(trial.relation.reasons))
        evidence.tell("throughput", "not compared", f"another launch ({reasons})")
        return
    verdict = judge(rates, trial.throughput, tolerance)
    if verdict is None or len(rates) < FEWEST - 1:
        evidence.tell("throughput", "not compared", "too few steps before the save, or observed")
        return
    trial.numbers["resume/throughput_ratio"] = 1.0 - verdict.missing
    slow = slow_ranks(forward, tolerance) if verdict.is_slower else []
    found = {"median": verdict.found, "slower by": verdict.missing, "slow ranks": slow}
    evidence.note(
        "throughput", "tokens_per_second", (trial.throughput or {})["tokens_per_second"], found,
        agrees=not verdict.is_slower, tolerance=f"{verdict.allowed:.4f} ({verdict.source})",
    )  # fmt: skip


def judge_network(evidence: Evidence, trial: Trial, before: Mapping[str, int]) -> None:
    """Notes what this machine's network lost meanwhile; it is judged where there are several."""
    problems = network_problems(before, trial.network())
    if trial.ranks.world_size <= trial.ranks.local_world_size:  # else not the training's
        evidence.tell("communication", "network", problems or "nothing lost")
        return
    evidence.note(
        "communication", "network of rank 0's machine", [], problems, only_warns=True,
        tolerance="1 % of TCP segments sent again, at least 100; no InfiniBand error",
        meaning="the network between the machines loses data",
    )  # fmt: skip
