# SPDX-License-Identifier: Apache-2.0
"""What would be sent to W&B is the story: every panel, every run set, every table."""

import importlib.util
import json

import pytest

from mprecipes.errors import ConfigError, RecipeError
from mprecipes.observe.curves import MODE_COLORS
from mprecipes.observe.wandb_report import report_to_wandb
from tests.stories import story

RUNS = {"fp32": ["a0", "a1"], "bf16": ["b0", "b1"]}
needs_extra = pytest.mark.skipif(
    importlib.util.find_spec("wandb_workspaces") is None,
    reason="the extra reports is not installed",
)


@pytest.fixture
def sent(tmp_path):
    """The content of wandb_report.json; no server is asked."""
    path = report_to_wandb(story(), RUNS, way="json", folder=tmp_path, project="modes", entity="us")
    assert path == str(tmp_path / "wandb_report.json")
    return json.loads((tmp_path / "wandb_report.json").read_text())


@needs_extra
def test_where_it_goes(sent):
    """Title, project and entity."""
    assert (sent["displayName"], sent["projectName"], sent["entityName"]) == (
        "Modes <compared>", "modes", "us",
    )  # fmt: skip
    assert sent["description"] == "a recipe & its data / 4 runs"
    assert sent["spec"]["width"] == "fluid"


@needs_extra
def test_verdicts_and_tables_are_markdown(sent):
    """In the order of the page: verdicts, leading tables, panels, method."""
    blocks = sent["spec"]["blocks"]
    kinds = [block["type"] for block in blocks if block["type"] != "paragraph"]
    assert kinds == [
        "markdown-block", "heading", "markdown-block", "markdown-block", "heading", "panel-grid",
        "heading", "markdown-block",
    ]  # fmt: skip
    text = json.dumps(blocks)
    assert "**bf16: equivalent**" in text
    assert "| bf16 | 2.5012 |" in text
    assert "Paired by seed." in text


@needs_extra
def test_a_run_set_per_arm_holds_its_runs_and_no_others(sent):
    """Filtered by run id, grouped by precision."""
    grid = next(b for b in sent["spec"]["blocks"] if b["type"] == "panel-grid")
    sets = grid["metadata"]["runSets"]
    assert [each["name"] for each in sets] == ["fp32", "bf16"]
    for each in sets:
        (only,) = each["filters"]["filters"]
        assert only["key"] == {"section": "run", "name": "name"}
        assert (only["op"], only["value"]) == ("IN", RUNS[each["name"]])
        assert each["grouping"] == [{"section": "config", "name": "precision.value"}]
    colors = grid["metadata"]["customRunColors"]
    assert MODE_COLORS["bf16"] in json.dumps(colors)


@needs_extra
@pytest.mark.parametrize(
    ("index", "kind", "title", "metric", "is_log"),
    [
        (0, "Run History Line Plot", "Training loss", "train/loss", None),
        (1, "Run History Line Plot", "Held-out loss", "eval/loss", None),
        (2, "Run History Line Plot", "Gradient norm", "train/grad_norm", True),
        (3, "Run History Line Plot", "Loss scale", "precision/loss_scale", True),
        (4, "Run History Line Plot", "Skipped steps", "precision/skipped_steps", None),
        (5, "Run History Line Plot", "Learning rate", "train/learning_rate", None),
        (6, "Bar Chart", "Tokens per second", "perf/tokens_per_second", None),
        (7, "Bar Chart", "Peak device memory, bytes", "perf/device_memory_bytes", None),
        (8, "Bar Chart", "Peak host memory, bytes", "perf/host_memory_bytes", None),
    ],
)
def test_each_panel(sent, index, kind, title, metric, is_log):
    """Its kind, metric, x axis, grouping and place; two in a row, none upon another."""
    grid = next(b for b in sent["spec"]["blocks"] if b["type"] == "panel-grid")
    panels = grid["metadata"]["panelBankSectionConfig"]["panels"]
    assert len(panels) == 9
    panel = panels[index]
    config = panel["config"]
    assert (panel["viewType"], config["chartTitle"]) == (kind, title)
    assert config["metrics"] == [metric]
    assert (config["groupBy"], config["groupAgg"]) == ("precision.value", "mean")
    assert config["groupArea"] == "minmax"
    assert config.get("yLogScale") == is_log
    assert config.get("xAxis") == (None if kind == "Bar Chart" else "train/step")
    assert panel["layout"] == {"x": 12 * (index % 2), "y": 8 * (index // 2), "w": 12, "h": 8}


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch):
    """Before anything is sent."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        report_to_wandb(story(), RUNS, way="json", folder=tmp_path, project="modes")
    assert refused.value.found == "wandb-workspaces is not installed"
    assert "extra `reports`" in refused.value.expected
    assert refused.value.where == "--wandb_report"
    assert "mprecipes[reports]" in refused.value.action


@needs_extra
def test_a_failure_has_an_address(tmp_path):
    """Whatever the client or the disk says, in our own form."""
    with pytest.raises(RecipeError) as failed:
        report_to_wandb(story(), RUNS, way="json", folder=tmp_path / "none", project="modes")
    assert "FileNotFoundError" in failed.value.found
    assert "takes the report" in failed.value.expected
    assert failed.value.where.startswith("--wandb_report json")
    assert "WANDB_BASE_URL" in failed.value.action
