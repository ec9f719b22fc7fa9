# SPDX-License-Identifier: Apache-2.0
"""Makes a report of any set of runs: reads their folders, judges them, and has it written.

Where some run is in FP32 and has the seed of others, those get the verdicts of a comparison; the
rest is shown without one.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mprecipes.errors import ConfigError
from mprecipes.observe.report import Written, plain, write_report
from mprecipes.observe.story import Judged, ShownRun, Story
from mprecipes.observe.wandb_report import Way, report_to_wandb
from mprecipes.tools import compare_verdict, report_tables
from mprecipes.tools.compare_check import settings_that_differ
from mprecipes.tools.compare_measures import DIVERGED, Arm, gaps, judge_runs, margin_over
from mprecipes.tools.compare_plan import slug_of
from mprecipes.tools.run_records import WARM_UP_STEPS, WINDOW_STEPS, RunRecord, read_record

FEW = 3  # values that are named and not counted
METHOD = (
    "End to end: tokens per second are counted from the journal of whole training steps (data, "
    "forward, backward, update), not of single kernels. The first "
    f"{WARM_UP_STEPS} steps of every launch are left out. 'End to end' is all tokens over all time "
    f"with what saves cost; 'without saves' is the median of windows of {WINDOW_STEPS} steps. "
    "Evaluations are in neither.",
    "Same conditions: initial weights, batches, learning rates, stopping rule and all settings but "
    "the arm's own are compared by digest for every pair of runs; a pair that differs is refused "
    "and gets no verdict.",
    "Several seeds, regression against FP32: every run is compared with the FP32 run of its own "
    "seed, and the differences are averaged over seeds. Loss is equivalent when the 90 % "
    "confidence interval of the mean difference lies within the margin on both sides (two "
    "one-sided t-tests at 5 %; Schuirmann 1987, Lakens 2017). It is worse when the interval lies "
    "above 0 and is not within the margin. If neither holds, more seeds are needed; one seed never "
    "gives a verdict.",
    f"Margin: the larger of {compare_verdict.RELATIVE_MARGIN:.2%} of FP32's final loss "
    "(DeepSeek-V3 report, arXiv 2412.19437, section 3.3) and FP32's own spread over seeds, at most "
    f"{compare_verdict.LARGEST_MARGIN:.0%} of the loss (the quality MLPerf Inference asks of "
    "reduced precision, arXiv 1911.02549).",
    "Divergence: a loss that is not finite, a run that ended for its numerics, or a smoothed "
    f"training loss that from some step to the end stays {DIVERGED:.0%} above FP32's.",
    f"Gain: faster or smaller by at least {compare_verdict.GAIN:.0%}, with a 90 % interval of the "
    "ratio (geometric mean over seeds) that excludes 1. 'No gain' is said of an arm without "
    "either, whatever its loss.",
)


def name_arms(paths: Sequence[Path]) -> list[RunRecord]:
    """Reads runs of any origin; those of one mode and one seed are told apart by their folders.

    Args:
        paths: run folders, and folders of comparisons for all runs of their arms; one that is named
            twice is read once.

    Raises:
        ConfigError: a path is no run folder, or a comparison's plan is damaged.
    """
    paths = list({path.resolve(): path for path in paths}.values())
    compared = [path for path in paths if (path / "compare.json").exists()]
    planned = [run for path in compared for run in _runs_of_comparison(path)]
    known = {run.path.resolve() for run in planned}
    runs = [read_record(p) for p in paths if p not in compared and p.resolve() not in known]
    counts = Counter((run.arm, run.seed) for run in [*planned, *runs])
    doubled = {arm for (arm, _), count in counts.items() if count > 1}
    names = _short_names([run.path for run in runs])
    return planned + [
        replace(run, arm=f"{run.mode} ({name})") if run.arm in doubled else run
        for run, name in zip(runs, names, strict=True)
    ]


def _short_names(paths: Sequence[Path]) -> list[str]:
    """Gives the end of each path, of as many parts as it takes to tell all apart."""
    parts = [path.resolve().parts for path in paths]
    most = max(map(len, parts), default=1)
    names = ["/".join(each[-1:]) for each in parts]
    for count in range(2, most + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(each[-count:]) for each in parts]
    return names


def _runs_of_comparison(folder: Path) -> list[RunRecord]:
    """Gives the runs of a comparison that have begun, under the names of their arms."""
    file = folder / "compare.json"
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
        places = [
            (arm, folder / slug_of(arm) / f"seed-{seed}")
            for arm in plan["arms"]
            for seed in plan["seeds"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{type(error).__name__}: {error}",
            expected="the plan that mprecipes compare wrote: its arms and seeds",
            where=str(file),
            action="put back a copy of it, or name the run folders themselves",
        ) from error
    return [read_record(run, arm=arm) for arm, run in places if (run / "run.json").exists()]


def tell(runs: Sequence[RunRecord], title: str | None = None) -> Story:
    """Gives the story of runs: judged where there is an FP32 run of their seed."""
    arms = judge_runs(runs)
    reference = next((arm for arm in arms if arm.verdict.word in ("reference", "incomplete")
                      and arm.mode == "fp32"), None)  # fmt: skip
    fp32 = {} if reference is None else reference.runs
    margin = margin_over(fp32)
    tables = [
        report_tables.verdict_table(arms, margin) if arms else None,
        report_tables.cost_table(arms) if arms else None,
        report_tables.runs_table(runs),
        report_tables.conditions_table(arms),
        report_tables.settings_table(runs),
        report_tables.resumes_table(runs),
        report_tables.environment_table(runs),
    ]
    return Story(
        title=title or ("Precision modes compared" if len(arms) > 1 else "Report of runs"),
        facts=_facts(runs),
        judged=[_judged(arm) for arm in arms],
        runs=[_shown(run, fp32) for run in runs],
        tables=[table for table in tables if table is not None],
        method=[*METHOD] if arms else [],
        margin=margin,
        data=_data(runs, arms, margin),
    )


def make_report(
    paths: Sequence[Path], folder: Path, title: str | None = None, way: Way | None = None
) -> tuple[Written, str | None]:
    """Writes the report of the runs in `paths` into `folder`; gives also where it is in W&B.

    Args:
        way: how it goes to W&B too; None for not at all.

    Raises:
        ConfigError: a path is no run folder, or `folder` cannot be written.
        VerificationError: a journal was changed after it was written.
    """
    runs = in_order(name_arms(paths))
    if not runs:
        raise ConfigError(
            "no run that has begun",
            expected="run folders, or the folder of a comparison with some",
            where=", ".join(map(str, paths)) or "the command line",
            action="name them: mprecipes report runs/fp32 runs/bf16 --output_dir runs/report",
        )
    story = tell(runs, title)
    written = write_report(story, folder)
    return written, send_report(story, runs, way, folder) if way else None


def send_report(story: Story, runs: Sequence[RunRecord], way: Way, folder: Path) -> str:
    """Sends a story to W&B, or writes what would be sent; gives its address or path.

    Project and entity are those the runs reported to.

    Raises:
        ConfigError: no run reported to W&B, or the extra `reports` is not installed.
        RecipeError: the server did not take it.
    """
    watches = [run.config.get("watch") or {} for run in runs]
    reporting = [watch for watch in watches if "wandb" in watch.get("report_to", ())]
    if not reporting and way != "json":
        raise ConfigError(
            "no run that reported to W&B",
            expected="runs trained with watch: {report_to: [wandb]}: a report shows their curves",
            where=f"--wandb_report {way}",
            action="train with it, or use --wandb_report json, or the HTML page alone",
        )
    said = reporting[0] if reporting else {}
    ids: dict[str, list[str]] = {}
    for run in runs:
        if run.wandb_id:
            ids.setdefault(run.arm, []).append(run.wandb_id)
    return report_to_wandb(
        story, ids, way=way, folder=folder, entity=said.get("entity"),
        project=said.get("project") or os.environ.get("WANDB_PROJECT", "mprecipes"),
    )  # fmt: skip


def in_order(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Gives runs by arm, FP32 first and then as they came, and by seed."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    arms.sort(key=lambda arm: all(run.mode != "fp32" for run in runs if run.arm == arm))
    return sorted(runs, key=lambda run: (arms.index(run.arm), run.seed or 0))


def _shown(run: RunRecord, fp32: dict[int, RunRecord]) -> ShownRun:
    reference = fp32.get(run.seed) if run.seed is not None else None
    return ShownRun(
        label=run.label,
        group=run.arm,
        mode=run.mode,
        seed=run.seed,
        train_loss={record.step: record.loss for record in run.steps},
        heldout=run.heldout,
        gap={} if reference is None or reference is run else gaps(reference, run),
        grad_norm={record.step: record.grad_norm for record in run.steps},
        loss_scale={r.step: r.loss_scale for r in run.steps if r.loss_scale is not None},
        skipped=tuple(run.skipped),
        tokens_per_second=run.tokens_per_second,
        tokens_per_second_with_saves=run.tokens_per_second_with_saves,
        peak_memory_bytes=run.memory[1] if run.memory else None,
        memory_of=run.memory[0] if run.memory else None,
    )


def _judged(arm: Arm) -> Judged:
    verdict = arm.verdict
    found = verdict.quality.interval if verdict.quality else None
    return Judged(
        group=arm.name,
        mode=arm.mode,
        word=verdict.word,
        reason=verdict.reason,
        tone=report_tables.TONES.get(verdict.word, ""),
        low=found.low if found else None,
        mean=found.mean if found else None,
        high=found.high if found else None,
        speed=_mean_of(verdict.speed),
        memory=_mean_of(verdict.memory),
    )


def _mean_of(finding: compare_verdict.Finding | None) -> float | None:
    return finding.interval.mean if finding and finding.interval else None


def _facts(runs: Sequence[RunRecord]) -> list[str]:
    """The lines under the title: what the runs have, or how many values there are."""

    def said(name: str, values: Sequence[Any]) -> str:
        known = list(dict.fromkeys(str(value) for value in values if value is not None))
        return " and ".join(known) if 0 < len(known) <= FEW else f"{len(known)} {name}"

    recipes = [run.facts.get("recipe") or {} for run in runs]
    topologies = [run.facts.get("topology") or {} for run in runs]
    environments = [run.facts.get("environment") or {} for run in runs]
    devices = [
        (env.get("gpus") or [env.get("cpu_model")])[0] for env in environments if env
    ]  # one name for all of a run's devices
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    return [
        said("recipes", [f"{r['name']}@{r['version']}" for r in recipes if r]),
        f"{len(runs)} runs",
        f"{said('lengths', [run.horizon for run in runs])} steps",
        f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
        if seeds else "no seed",
        said("devices", devices) if devices else "device not recorded",
        f"processes: {said('numbers', [t.get('world_size') for t in topologies if t])}",
    ]  # fmt: skip


def _data(runs: Sequence[RunRecord], arms: Sequence[Arm], margin: float | None) -> dict[str, Any]:
    """Everything of the report as JSON; numbers in full."""
    return plain({
        "schema": 1,
        "margin_nats": margin,
        "arms": [arm.to_dict() for arm in arms],
        "runs": [
            {
                "run": run.label,
                "arm": run.arm,
                "mode": run.mode,
                "seed": run.seed,
                "folder": report_tables.short_path(run),
                "outcome": run.outcome,
                "error": run.error,
                "launches": run.num_attempts,
                "step": run.steps[-1].step if run.steps else 0,
                "horizon": run.horizon,
                "final_loss": run.final_loss,
                "mean_height": run.area,
                "loss_kind": run.loss_kind,
                "heldout": run.heldout,
                "tokens_per_second": run.tokens_per_second,
                "tokens_per_second_with_saves": run.tokens_per_second_with_saves,
                "peak_memory_bytes": run.memory[1] if run.memory else None,
                "memory_of": run.memory[0] if run.memory else None,
                "initial_weights": run.initial_weights,
                "skipped_steps": run.skipped,
                "model_weights": run.size and run.size.trained + run.size.frozen,
                "resumes": run.resumes,
            }
            for run in runs
        ],
        "settings_that_differ": settings_that_differ([*runs]),
        "environment": [run.facts.get("environment") for run in runs[:1]],
        "method": [*METHOD] if arms else [],
    })  # fmt: skip
