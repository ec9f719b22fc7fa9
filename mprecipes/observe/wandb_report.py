# SPDX-License-Identifier: Apache-2.0
"""A story as a W&B Report: the verdicts as a table, the curves live from the runs themselves.

Made with the extra `reports` (wandb-workspaces); any W&B host, by WANDB_BASE_URL. One run set an
arm, filtered to that arm's runs by their ids, and every panel grouped by `precision` of their
config.
"""

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mprecipes.errors import ConfigError, RecipeError
from mprecipes.observe.curves import MUTED, colors_of
from mprecipes.observe.page import markdown_table
from mprecipes.observe.story import Story

Way = Literal["draft", "publish", "json"]
STEP = "train/step"
TITLE_LENGTH = 128  # wandb-workspaces refuses a longer one
# title, metric, logarithmic
CURVES = (
    ("Training loss", "train/loss", False),
    ("Held-out loss", "eval/loss", False),
    ("Gradient norm", "train/grad_norm", True),
    ("Loss scale", "precision/loss_scale", True),
    ("Skipped steps", "precision/skipped_steps", False),
    ("Learning rate", "train/learning_rate", False),
)
BARS = (
    ("Tokens per second", "perf/tokens_per_second"),
    ("Peak device memory, bytes", "perf/device_memory_bytes"),
    ("Peak host memory, bytes", "perf/host_memory_bytes"),
)


def report_to_wandb(
    story: Story,
    runs: Mapping[str, Sequence[str]],
    *,
    way: Way,
    folder: Path,
    project: str,
    entity: str | None = None,
) -> str:
    """Saves a story as a report, or only writes what would be saved; gives its address or path.

    Args:
        runs: W&B ids of the runs of every group of the story.
        way: "draft" and "publish" send it; "json" writes `wandb_report.json` and asks no server.
        folder: for "json".
        entity: None for the default of whoever is logged in.

    Raises:
        ConfigError: the extra is not installed.
        RecipeError: W&B did not take it.
    """
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError(
            "wandb-workspaces is not installed",
            expected="the extra `reports`",
            where="--wandb_report",
            action="pip install 'mprecipes[reports]', or leave --wandb_report out",
        )
    entity = entity or os.environ.get("WANDB_ENTITY") or ("" if way == "json" else None)
    try:
        report = build_report(story, runs, project=project, entity=entity)
        if way == "json":
            path = folder / "wandb_report.json"
            path.write_text(json.dumps(spec_of(report), indent=1) + "\n", encoding="ascii")
            return str(path)
        report.save(draft=way == "draft")
    except Exception as error:  # whatever its client raises, of which there are many kinds
        raise RecipeError(
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            expected="a W&B server that takes the report",
            where=f"--wandb_report {way}, server {os.environ.get('WANDB_BASE_URL', 'of W&B')}",
            action="log in (wandb login, or WANDB_API_KEY), check WANDB_BASE_URL; the page and the "
            "Markdown are written in any case",
        ) from error
    return str(report.url)


def spec_of(report: Any) -> dict[str, Any]:
    """Gives what `save` sends. Source: wandb-workspaces 0.4.13, reports/v2/interface.py."""
    model = report._to_model()
    return {
        "displayName": model.display_name,
        "description": model.description,
        "projectName": model.project.name,
        "entityName": model.project.entity_name,
        "spec": json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True)),
    }


def build_report(
    story: Story, runs: Mapping[str, Sequence[str]], *, project: str, entity: str | None
) -> Any:
    """Gives the report as the client's object; with an entity it asks no server."""
    import wandb_workspaces.reports.v2 as wr

    facts = " / ".join(story.facts)
    blocks: list[Any] = [wr.MarkdownBlock(text=facts)]
    if story.judged:
        lines = [f"- **{each.group}: {each.word}**. {each.reason}" for each in story.judged]
        blocks += [wr.H2(text="Verdicts"), wr.MarkdownBlock(text="\n".join(lines))]
    blocks += [wr.MarkdownBlock(text=markdown_table(t)) for t in story.tables if t.leads]
    blocks += [wr.H2(text="Curves"), _grid(wr, story, runs)]
    blocks += [wr.MarkdownBlock(text=markdown_table(t)) for t in story.tables if not t.leads]
    if story.method:
        blocks += [wr.H2(text="Method"), wr.MarkdownBlock(text="\n\n".join(story.method))]
    known = {} if entity is None else {"entity": entity}
    return wr.Report(
        project=project, title=story.title[:TITLE_LENGTH], description=facts, width="fluid",
        blocks=blocks, **known,
    )  # fmt: skip


def _grid(wr: Any, story: Story, runs: Mapping[str, Sequence[str]]) -> Any:
    """The panels, two in a row; a run set without entity and project is of the report's own."""
    from wandb_workspaces import expr

    colors = colors_of(story.runs)
    sets = [
        wr.Runset(
            name=group,
            filters=[expr.Metric("ID").isin([*ids])],
            groupby=["config.precision"],
            run_settings={each: wr.RunSettings(color=colors.get(group, MUTED)) for each in ids},
        )
        for group, ids in runs.items()
    ]
    by_precision = {"groupby": wr.Config("precision"), "groupby_aggfunc": "mean",
                    "groupby_rangefunc": "minmax"}  # fmt: skip
    panels = [
        wr.LinePlot(
            title=title, x=STEP, y=[metric], title_x="optimizer step", log_y=is_log or None,
            layout=_place(wr, index), **by_precision,
        )
        for index, (title, metric, is_log) in enumerate(CURVES)
    ]  # fmt: skip
    panels += [
        wr.BarPlot(title=title, metrics=[metric], layout=_place(wr, index), **by_precision)
        for index, (title, metric) in enumerate(BARS, start=len(CURVES))
    ]
    return wr.PanelGrid(runsets=sets, panels=panels)


def _place(wr: Any, index: int) -> Any:
    return wr.Layout(x=12 * (index % 2), y=8 * (index // 2), w=12, h=8)
