# SPDX-License-Identifier: Apache-2.0
"""The tables of a report, as cells with the numbers behind them."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from mprecipes.observe.story import MEMORY_OF, Cell, Table, Tone
from mprecipes.tools.compare_check import clip, settings_that_differ
from mprecipes.tools.compare_measures import Arm
from mprecipes.tools.compare_verdict import Finding, Interval
from mprecipes.tools.run_records import RunRecord

TONES: dict[str, Tone] = {
    "equivalent": "good", "faster but worse": "warn", "diverges": "bad", "no gain": "muted",
    "not enough seeds": "warn", "not comparable": "bad", "out of memory": "bad",
    "incomplete": "warn", "reference": "",
}  # fmt: skip
RATIO_TONES: dict[str, Tone] = {
    "faster": "good", "slower": "bad", "smaller": "good", "larger": "bad",
}  # fmt: skip
RESUME_TONES: dict[str, Tone] = {"released": "good", "halted": "bad"}
ENVIRONMENT = (
    "python", "torch", "accelerate", "transformers", "deepspeed", "torchao", "cpu_model",
    "num_threads", "gpus", "cuda", "driver", "platform", "git_commit", "git_dirty",
)  # fmt: skip
MIB = 1 << 20


def number(value: float | None, form: str = ".4f", unit: str = "", tone: Tone = "") -> Cell:
    """Gives a cell of a number; a dash where there is none, its name where it is not finite."""
    if value is None:
        return Cell("-", None, "muted")
    if not math.isfinite(value):
        return Cell(str(value), None, "bad")
    return Cell(f"{value:{form}}{unit}", value, tone)


def verdict_table(arms: Sequence[Arm], margin: float | None) -> Table:
    """Gives the table of what became of each arm's loss."""
    columns = (
        "arm", "verdict", "final loss", "spread over seeds", "minus FP32", "90 % interval",
        "mean height minus FP32", "largest gap", "leaves FP32 at", "gradient norm / FP32",
    )  # fmt: skip
    rows: list[list[Cell]] = []
    for arm in arms:
        m, verdict = arm.measures, arm.verdict
        gap = m["largest_gap"]
        left = [step for step in m["divergence_step"].values() if step]
        quality = verdict.quality.interval if verdict.quality else None
        rows.append([
            Cell(arm.name),
            Cell(verdict.word, None, TONES.get(verdict.word, "")),
            number(m["final_loss"]["mean"]),
            number(m["final_loss"]["spread"]),
            number(m["loss_difference"]["mean"], "+.4f"),
            _ends(quality, "+.4f"),
            number(m["mean_height_difference"]["mean"], "+.4f"),
            number(gap and gap["value"], "+.4f", f" at step {gap['step']}" if gap else ""),
            number(min(left) if left else None, "d", tone="bad"),
            number(m["grad_norm_ratio"]["mean"], ".3f"),
        ])  # fmt: skip
    kind = next((arm.measures["loss_kind"] for arm in arms if arm.runs), "held-out")
    note = f"Losses are {kind}, in nats per token, and differences are paired by seed."
    if margin is not None:
        note += f" Margin of equivalence: {margin:.4f} nats."
    return Table("verdicts", "Verdicts", columns, rows, note, leads=True)


def cost_table(arms: Sequence[Arm]) -> Table:
    """Gives the table of speed, memory, skips and time to FP32's loss."""
    columns = [
        "arm", "tokens/s end to end", "x FP32", "90 % interval", "tokens/s without saves",
        "peak memory", "x FP32", "time to FP32's loss", "skipped steps", "loss scale",
    ]  # fmt: skip
    has_mfu = any(arm.measures["model_flops_utilization"]["mean"] is not None for arm in arms)
    rows = []
    for arm in arms:
        m, verdict = arm.measures, arm.verdict
        peak = m["peak_memory_bytes"]["mean"]
        speed = verdict.speed.interval if verdict.speed else None
        seconds = m["seconds_to_fp32_loss"]
        reached = [value for value in seconds["by_seed"].values() if value is not None]
        missed = len(seconds["by_seed"]) - len(reached)
        scale = m["loss_scale"]
        row = [
            Cell(arm.name),
            number(m["tokens_per_second_with_saves"]["mean"], ",.0f"),
            _ratio(verdict.speed),
            _ends(speed, ".2f"),
            number(m["tokens_per_second"]["mean"], ",.0f"),
            number(None if peak is None else peak / MIB, ",.0f", " MiB"),
            _ratio(verdict.memory),
            Cell(f"not reached by {missed} of {missed + len(reached)}", None, "warn") if missed
            else number(fmean(reached) if reached else None, ",.1f", " s"),
            number(m["skipped_steps"], "d", tone="warn" if m["skipped_steps"] else ""),
            Cell(f"{scale['first']:g} to {scale['last']:g}") if scale else number(None),
        ]  # fmt: skip
        if has_mfu:
            row.append(number(m["model_flops_utilization"]["mean"], ".1%"))
        rows.append(row)
    if has_mfu:
        columns.append("MFU")
    measured = {arm.measures["memory_of"] for arm in arms if arm.measures["memory_of"]}
    kinds = [MEMORY_OF[kind] for kind in sorted(measured)]
    note = (
        f"Warm-up steps are left out. Memory is the peak of {' and of '.join(kinds)}. "
        "Time to FP32's loss counts training and saves, until the curve is within the margin of "
        "FP32's end, of the same seed."
    )
    return Table("costs", "Speed and memory", tuple(columns), rows, note, leads=True)


def _ends(found: Interval | None, form: str) -> Cell:
    if found is None or found.low is None or found.high is None:
        return number(None)
    return Cell(f"{found.low:{form}} to {found.high:{form}}")


def _ratio(finding: Finding | None) -> Cell:
    if finding is None or finding.interval is None:
        return number(None)
    tone: Tone = RATIO_TONES.get(finding.word, "")
    return number(finding.interval.mean, ".2f", tone=tone)


def runs_table(runs: Sequence[RunRecord]) -> Table:
    """Gives one row a run."""
    columns = (
        "run", "outcome", "launches", "steps", "final loss", "tokens/s end to end", "peak memory",
        "folder",
    )  # fmt: skip
    rows = [
        [
            Cell(run.label),
            Cell(run.outcome, None, "good" if run.outcome == "finished" else "bad"),
            number(run.num_attempts, "d"),
            number(run.steps[-1].step if run.steps else 0, "d", f" of {run.horizon}"),
            number(run.final_loss),
            number(run.tokens_per_second_with_saves, ",.0f"),
            number(run.memory[1] / MIB if run.memory else None, ",.0f", " MiB"),
            Cell(short_path(run)),
        ]
        for run in runs
    ]
    return Table("runs", "Runs", columns, rows)


def short_path(run: RunRecord) -> str:
    """Gives the last two parts of a run's path: a report is read on other machines."""
    return "/".join(run.path.resolve().parts[-2:])


def conditions_table(arms: Sequence[Arm]) -> Table | None:
    """Gives, for each thing that must be equal, FP32's value and whether every arm's is the same.

    A thing that only one arm differs in is a row too.
    """
    others = [arm for arm in arms if arm.verdict.word != "reference" and arm.conditions]
    keys = list(dict.fromkeys((c.seed, c.what) for arm in others for c in arm.conditions))
    if not keys:
        return None
    rows = []
    for seed, what in sorted(keys, key=lambda key: (key[0] or 0, keys.index(key))):
        found = {
            a.name: c for a in others for c in a.conditions if (c.seed, c.what) == (seed, what)
        }
        row = [Cell(what), Cell(str(seed)), Cell(clip(next(iter(found.values())).expected))]
        for arm in others:
            one = found.get(arm.name)
            if one is None:
                row.append(number(None))
            else:
                row.append(Cell("equal", None, "good") if one.equal
                           else Cell(clip(one.found), None, "bad"))  # fmt: skip
        rows.append(row)
    note = "Digests by their first 16 digits; report.json has every row."
    columns = ("must be equal", "seed", "FP32", *(arm.name for arm in others))
    return Table("conditions", "Same conditions", columns, rows, note)


def settings_table(runs: Sequence[RunRecord]) -> Table | None:
    """Gives the options that are not the same in all runs; one column an arm."""
    groups = list(dict.fromkeys(run.arm for run in runs))
    different = settings_that_differ([*runs])
    if not different:
        return None
    rows = []
    for name, values in different.items():
        cells = [
            ", ".join(dict.fromkeys(v for v, run in zip(values, runs, strict=True) if run.arm == g))
            for g in groups
        ]
        if len(set(cells)) > 1:  # else it differs between the seeds of each arm alike
            rows.append([Cell(name), *map(Cell, cells)])
    return Table("settings", "Settings that differ", ("setting", *groups), rows) if rows else None


def resumes_table(runs: Sequence[RunRecord]) -> Table | None:
    """Gives every resume of every run, with what was proven of it."""
    rows = [
        [
            Cell(run.label),
            number(resume["attempt"], "d"),
            Cell(str(resume["checkpoint"] or "started again")),
            Cell(str(resume["verdict"]), None, RESUME_TONES.get(resume["verdict"], "warn")),
            number(resume["replayed_steps"], "d"),
            Cell(", ".join(f"{name} {verdict}" for name, verdict in resume["checks"].items())),
        ]
        for run in runs
        for resume in run.resumes
    ]  # fmt: skip
    columns = ("run", "attempt", "resumed from", "verdict", "steps replayed", "checks")
    return Table("resumes", "Resumes and their proofs", columns, rows) if rows else None


def environment_table(runs: Sequence[RunRecord]) -> Table | None:
    """Gives versions and devices; one that is not the same in all runs shows every value."""
    found = [run.facts.get("environment") or {} for run in runs]
    names = [name for name in ENVIRONMENT if any(each.get(name) for each in found)]
    rows = []
    for name in names:
        values = list(dict.fromkeys(_text(each.get(name)) for each in found if each))
        rows.append([Cell(name), Cell(" / ".join(values), None, "warn" if len(values) > 1 else "")])
    return Table("environment", "Environment", ("fact", "value"), rows) if rows else None


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
