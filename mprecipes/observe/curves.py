# SPDX-License-Identifier: Apache-2.0
"""What is common to all views of runs: one colour an arm, means over seeds, smoothed curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from mprecipes.observe.story import ShownRun

INK, MUTED, GRID, BAND, BAD = "#1f2430", "#6b7280", "#eceef2", "#0f766e", "#b91c1c"
MODE_COLORS = {
    "fp32": "#374151", "tf32": "#9ca3af", "bf16": "#0f766e", "fp16": "#d97706", "fp8": "#7c3aed",
}  # fmt: skip
MORE_COLORS = ("#2563eb", "#db2777", "#65a30d", "#0891b2", "#b45309", "#4f46e5")


def colors_of(runs: Iterable[ShownRun]) -> dict[str, str]:
    """Gives each group its colour: its mode's own, or the next free one."""
    colors: dict[str, str] = {}
    free = list(MORE_COLORS)
    for run in sorted(runs, key=lambda each: each.group != each.mode):  # plain modes choose first
        if run.group not in colors:
            own = MODE_COLORS.get(run.mode)
            taken = own is None or own in colors.values()
            colors[run.group] = (free.pop(0) if free else MUTED) if taken or own is None else own
    return colors


def by_group(runs: Iterable[ShownRun]) -> dict[str, list[ShownRun]]:
    """Gives the runs of each group, both in their order."""
    groups: dict[str, list[ShownRun]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    return groups


def mean_curve(curves: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Gives the mean of curves at the steps that all of them have."""
    common = set.intersection(*(set(curve) for curve in curves)) if curves else set()
    return {step: fmean(curve[step] for curve in curves) for step in sorted(common)}


def smoothed(curve: Mapping[int, float]) -> dict[int, float]:
    """Gives the mean over each step and those before it, a twentieth of the curve wide."""
    items = sorted(curve.items())
    width = max(1, math.ceil(len(items) / 20))
    return {
        step: fmean(value for _, value in items[max(0, i + 1 - width) : i + 1])
        for i, (step, _) in enumerate(items)
    }
