# SPDX-License-Identifier: Apache-2.0
"""Measures every arm of a comparison against FP32, seed by seed, and gives each its verdict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from mprecipes.tools.compare_check import Sameness, clip, compare_conditions
from mprecipes.tools.compare_verdict import (
    Finding,
    Verdict,
    decide,
    judge_loss,
    judge_ratio,
    margin_of,
    seeds_needed,
)
from mprecipes.tools.run_records import RunRecord, smooth

DIVERGED = 0.1  # smoothed training loss stays this share above FP32's from one step to the end


@dataclass(frozen=True)
class Arm:
    """One arm of a comparison: its runs by seed, and what is said of them."""

    name: str
    mode: str
    runs: dict[int, RunRecord]
    conditions: list[Sameness]
    measures: dict[str, Any]
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        return {
            "arm": self.name,
            "mode": self.mode,
            "seeds": sorted(self.runs),
            "outcomes": {str(seed): run.outcome for seed, run in sorted(self.runs.items())},
            "conditions": [each.to_dict() for each in self.conditions],
            "measures": self.measures,
            "verdict": self.verdict.to_dict(),
        }


def judge_runs(runs: Sequence[RunRecord]) -> list[Arm]:
    """Groups runs by arm and judges each against the first arm in FP32; [] where there is none.

    A run without a seed, or a second one of an arm's seed, is left out.
    """
    by_arm: dict[str, dict[int, RunRecord]] = {}
    for run in runs:
        if run.seed is not None:
            by_arm.setdefault(run.arm, {}).setdefault(run.seed, run)
    reference = next((name for name, group in by_arm.items() if _mode(group) == "fp32"), None)
    if reference is None:
        return []
    return [_judge(name, group, by_arm[reference], reference) for name, group in by_arm.items()]


def margin_over(fp32: dict[int, RunRecord]) -> float | None:
    """Gives the margin of equivalence from the FP32 runs that have a final loss, by seed."""
    ends = [run.final_loss for run in fp32.values() if run.final_loss is not None]
    known = [loss for loss in ends if math.isfinite(loss)]
    return margin_of(known) if known else None


def _mode(group: dict[int, RunRecord]) -> str:
    return next((run.mode for run in group.values() if run.mode != "unknown"), "unknown")


def _judge(
    name: str, group: dict[int, RunRecord], fp32: dict[int, RunRecord], reference: str
) -> Arm:
    begun = {seed: run for seed, run in group.items() if run.steps}
    conditions = [
        row
        for seed, run in sorted(begun.items())
        if seed in fp32 and fp32[seed].steps
        for row in compare_conditions(fp32[seed], run)
    ]
    pairs = [(fp32[s], run) for s, run in sorted(begun.items()) if s in fp32 and fp32[s].steps]
    margin = margin_over(fp32) or 0.0
    measures = _measures(group, pairs, margin)
    verdict = _verdict(name, group, pairs, margin, conditions, measures, reference)
    return Arm(name, _mode(group), group, conditions, measures, verdict)


def _verdict(
    name: str,
    group: dict[int, RunRecord],
    pairs: list[tuple[RunRecord, RunRecord]],
    margin: float,
    conditions: list[Sameness],
    measures: dict[str, Any],
    reference: str,
) -> Verdict:
    ends = sorted({run.outcome for run in group.values()})
    if name == reference:
        if broken := _not_finite(list(group.values())):
            return Verdict("incomplete", f"FP32 itself diverges: {broken}")
        whole = all(run.is_complete for run in group.values())
        return Verdict("reference" if whole else "incomplete", f"FP32; {', '.join(ends)}")
    if different := [row for row in conditions if not row.equal]:
        named = "; ".join(
            f"{row.what} (seed {row.seed}): {clip(row.expected)} in FP32, {clip(row.found)} here"
            for row in different[:3]
        )
        count = "1 thing differs" if len(different) == 1 else f"{len(different)} things differ"
        return Verdict("not comparable", f"{count}: {named}")
    if "out_of_memory" in ends:
        return Verdict("out of memory", "a run did not fit: a smaller batch, or another arm")
    if broken := _not_finite([run for run, _ in pairs]):
        return Verdict("incomplete", f"FP32 itself diverges: {broken}")
    diverged = {seed: step for seed, step in measures["divergence_step"].items() if step}
    unfinished = [
        run for seed, run in group.items() if not run.is_complete and str(seed) not in diverged
    ]
    if unfinished or not pairs:
        run = next(iter(unfinished), None)
        why = "FP32 has no run of its seeds" if run is None else f"{run.path.name}: {run.outcome}"
        return Verdict("incomplete", f"{why}{'; ' + run.error if run and run.error else ''}")
    if open_fp32 := [run for run, _ in pairs if not run.is_complete]:
        return Verdict("incomplete", f"FP32 itself: {open_fp32[0].label} {open_fp32[0].outcome}")
    both = [(a, b) for a, b in pairs if a.final_loss is not None and b.final_loss is not None]
    differences = [_minus(b.final_loss, a.final_loss) for a, b in both]
    if diverged:
        steps = ", ".join(f"seed {seed} from step {step}" for seed, step in diverged.items())
        quality = Finding("diverges", None, f"{len(diverged)} of {len(pairs)} runs: {steps}")
        return decide(quality, None, None, num_seeds=len(pairs))
    if not differences:
        return Verdict("incomplete", "no loss at the last step: see --eval_steps")
    quality = judge_loss(differences, margin)
    needed = None
    if quality.word == "undecided" and len(differences) > 1:
        needed = seeds_needed(differences, margin)
    speed = _ratios(pairs, lambda run: run.tokens_per_second_with_saves, "faster", "slower")
    memory = _ratios(
        pairs, lambda run: run.memory[1] if run.memory else None, "smaller", "larger",
        less_is_better=True,
    )  # fmt: skip
    return decide(quality, speed, memory, num_seeds=len(both), needed=needed)


def _not_finite(runs: list[RunRecord]) -> str:
    """Names the first run whose loss is not finite, and the step; empty where there is none."""
    return next((f"{run.label} from step {step}" for run in runs if (step := not_finite(run))), "")


def _ratios(
    pairs: list[tuple[RunRecord, RunRecord]], of: Any, better: str, worse: str, **how: bool
) -> Finding | None:
    values = [(of(a), of(b)) for a, b in pairs]
    ratios = [b / a for a, b in values if a and b]
    return judge_ratio(ratios, better, worse, **how) if ratios else None


def _minus(left: float | None, right: float | None) -> float:
    assert left is not None and right is not None
    return left - right


def _measures(
    group: dict[int, RunRecord], pairs: list[tuple[RunRecord, RunRecord]], margin: float
) -> dict[str, Any]:
    """Gives every number of an arm; per seed under the seed's text, None where there is none."""
    runs = [run for _, run in sorted(group.items())]
    scales = [r.loss_scale for run in runs for r in run.steps if r.loss_scale is not None]
    return {
        "final_loss": over_seeds({run.seed: run.final_loss for run in runs}),
        "loss_difference": over_seeds({
            b.seed: b.final_loss - a.final_loss
            for a, b in pairs
            if a.final_loss is not None and b.final_loss is not None
        }),
        "mean_height": over_seeds({run.seed: run.area for run in runs}),
        "mean_height_difference": over_seeds({
            b.seed: b.area - a.area
            for a, b in pairs
            if a.area is not None and b.area is not None
        }),
        "largest_gap": _largest_gap(pairs),
        "divergence_step": {str(b.seed): divergence_step(a, b) for a, b in pairs},
        "grad_norm_ratio": over_seeds({b.seed: grad_norm_ratio(a, b) for a, b in pairs}),
        "skipped_steps": sum(len(run.skipped) for run in runs),
        "loss_scale": {"first": scales[0], "last": scales[-1], "lowest": min(scales),
                       "highest": max(scales)} if scales else None,
        "tokens_per_second": over_seeds({run.seed: run.tokens_per_second for run in runs}),
        "tokens_per_second_with_saves": over_seeds(
            {run.seed: run.tokens_per_second_with_saves for run in runs}
        ),
        "peak_memory_bytes": over_seeds({r.seed: r.memory[1] if r.memory else None for r in runs}),
        "memory_of": next((run.memory[0] for run in runs if run.memory), None),
        "seconds_to_fp32_loss": over_seeds({
            b.seed: b.seconds_to(a.final_loss + margin)
            for a, b in pairs
            if a.final_loss is not None
        }),
        "model_flops_utilization": over_seeds({run.seed: run.utilization for run in runs}),
        "loss_kind": next((run.loss_kind for run in runs), "held-out"),
    }  # fmt: skip


def over_seeds(values: dict[int | None, float | None]) -> dict[str, Any]:
    """Gives mean, spread (standard deviation, None of one) and the values by seed."""
    known = [value for value in values.values() if value is not None]
    return {
        "mean": fmean(known) if known else None,
        "spread": stdev(known) if len(known) > 1 and all(map(math.isfinite, known)) else None,
        "by_seed": {str(seed): value for seed, value in values.items()},
    }


def gaps(reference: RunRecord, run: RunRecord) -> dict[int, float]:
    """Gives the difference of the judged loss to FP32 at every step both have it."""
    common = reference.losses.keys() & run.losses.keys()
    return {step: run.losses[step] - reference.losses[step] for step in sorted(common)}


def _largest_gap(pairs: list[tuple[RunRecord, RunRecord]]) -> dict[str, Any] | None:
    found = [(abs(gap), gap, step, b.seed) for a, b in pairs for step, gap in gaps(a, b).items()]
    if not found:
        return None
    _, gap, step, seed = max(found, key=lambda each: (each[0], -each[2]))
    return {"value": gap, "step": step, "seed": seed}


def divergence_step(reference: RunRecord, run: RunRecord) -> int | None:
    """Gives the step from which a run has left FP32's course for good; None if it has not.

    That is the first step whose loss, in training or held out, is not finite, the one after the
    last step of a run that ended with the outcome "numerics", or the first of the steps at the end
    in which the smoothed training loss is a tenth above FP32's. None where FP32 has no course.
    """
    if step := not_finite(run):
        return step
    if run.outcome == "numerics":
        return run.steps[-1].step + 1
    if not_finite(reference):
        return None
    count = min(len(reference.steps), len(run.steps))
    left, right = (smooth({r.step: r.loss for r in each.steps}, count) for each in (reference, run))
    first = None
    for step in sorted(left.keys() & right.keys(), reverse=True):
        if right[step] <= left[step] * (1 + DIVERGED):
            break
        first = step
    return first


def not_finite(run: RunRecord) -> int | None:
    """Gives the first step, from 1, with a training or held-out loss that is not finite."""
    losses = [*((record.step, record.loss) for record in run.steps), *run.heldout.items()]
    return min((max(1, step) for step, loss in losses if not math.isfinite(loss)), default=None)


def grad_norm_ratio(reference: RunRecord, run: RunRecord) -> float | None:
    """Gives the median over common steps of the gradient norm, divided by FP32's."""
    left = {record.step: record.grad_norm for record in reference.steps}
    ratios = [
        record.grad_norm / left[record.step]
        for record in run.steps
        if left.get(record.step) and math.isfinite(record.grad_norm)
    ]
    return median(ratios) if ratios else None
