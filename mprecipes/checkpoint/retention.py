# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints may be deleted, and why each stays: a pure plan, shown before carried out.

Only rolling checkpoints are ever given up. One that stays for a reason of its own (pinned, a step
of `keep_every`, the best, protected) uses up no place among the newest `keep_last`; one that is
known to be damaged neither counts nor is deleted.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from mprecipes.checkpoint.policy import CheckpointPolicy, split_metric


@dataclass(frozen=True)
class Decision:
    """What becomes of the checkpoint of one step.

    Attributes:
        reason: why it stays, or why it may go, in one clause.
    """

    step: int
    keep: bool
    reason: str


def plan_retention(
    steps: Iterable[int],
    policy: CheckpointPolicy,
    *,
    evaluations: Mapping[int, Mapping[str, float]] | None = None,
    pinned: Collection[int] = (),
    protected: Mapping[int, str] | None = None,
    damaged: Collection[int] = (),
) -> list[Decision]:
    """Gives one decision a step, oldest first; order is by step as a number.

    Args:
        steps: all published checkpoints.
        evaluations: step -> metric -> value, for `keep_best`.
        pinned: steps that a person keeps.
        protected: step -> reason of those that stay for now, whatever their age.
        damaged: steps that are known not to verify.
    """
    ordered, protected = sorted(set(steps)), protected or {}
    best = best_step(policy.keep_best, evaluations or {}, set(ordered) - set(damaged))
    reasons: dict[int, str] = {}
    for step in ordered:
        if step in damaged:
            reasons[step] = "does not verify; the next start moves it to quarantine"
        elif step in pinned:
            reasons[step] = "pinned"
        elif step in protected:
            reasons[step] = protected[step]
        elif policy.keep_every is not None and step % policy.keep_every == 0:
            reasons[step] = f"every {policy.keep_every} steps"
        elif step == best:
            reasons[step] = f"best {split_metric(policy.keep_best or '')[0]}"
    rolling = [step for step in ordered if step not in reasons]
    newest = rolling[-policy.keep_last :]
    for step in newest:
        reasons[step] = f"one of the newest {policy.keep_last}"
    gone = f"older than the newest {policy.keep_last}"
    return [Decision(step, step in reasons, reasons.get(step, gone)) for step in ordered]


def best_step(
    metric: str | None, evaluations: Mapping[int, Mapping[str, float]], steps: Collection[int]
) -> int | None:
    """Gives the step of the best value, of equal ones the latest; None where nothing was measured.

    Args:
        metric: as `policy.split_metric` takes it; None for no such rule.
        steps: those that can be chosen.
    """
    if metric is None:
        return None
    name, mode = split_metric(metric)
    sign = -1.0 if mode == "min" else 1.0
    found = [
        (sign * values[name], step)
        for step, values in evaluations.items()
        if step in steps and math.isfinite(values.get(name, math.nan))
    ]
    return max(found)[1] if found else None
