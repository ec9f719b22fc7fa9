# SPDX-License-Identifier: Apache-2.0
"""A report of real folders: any set of runs, judged where it can be."""

import importlib.util
import json
from pathlib import Path

import pytest

from mprecipes.errors import ConfigError
from mprecipes.tools.report import in_order, make_report, name_arms, send_report, tell
from tests.made_runs import make_arm, make_run


@pytest.fixture
def paths(tmp_path):
    fast = {"tokens_per_second": 1500.0}
    return make_arm(tmp_path, "bf16", **fast) + make_arm(tmp_path, "fp32")


def test_the_page_the_markdown_and_the_numbers(tmp_path, paths):
    """The verdict is in all three; FP32 comes first, though it was named last."""
    written, _ = make_report(paths, tmp_path / "out")
    data = json.loads(written.data.read_text())
    assert [(arm["arm"], arm["verdict"]["word"]) for arm in data["arms"]] == [
        ("fp32", "reference"), ("bf16", "equivalent"),
    ]  # fmt: skip
    assert [run["run"] for run in data["runs"]][:2] == ["fp32, seed 0", "fp32, seed 1"]
    assert "<h1>Precision modes compared</h1>" in written.html.read_text()
    assert "- **bf16: equivalent**" in written.markdown.read_text()
    assert data["settings_that_differ"]["precision"] == ["fp32"] * 3 + ["bf16"] * 3


def test_the_story_has_every_table_there_is_something_for(paths):
    """No resumes here; a settings table, because precision differs."""
    told = tell(in_order(name_arms(paths)))
    assert [table.name for table in told.tables] == [
        "verdicts", "costs", "runs", "conditions", "settings", "environment",
    ]  # fmt: skip
    assert told.facts == [
        "pretrain_causal_lm@1.0.0", "6 runs", "60 steps", "seeds 0, 1, 2", "A Processor",
        "processes: 1",
    ]  # fmt: skip
    assert told.margin == pytest.approx(told.data["margin_nats"])


def test_runs_without_fp32_are_shown_unjudged(tmp_path):
    """Curves, bars and settings of whatever it is given; no verdict, no method."""
    paths = make_arm(tmp_path, "bf16", seeds=(0,))
    paths += [make_run(tmp_path / "slow", mode="bf16", weight_decay=0.5)]
    told = tell(name_arms(paths))
    assert told.judged == [] and told.method == []
    assert [run.group for run in told.runs] == ["bf16 (bf16-0)", "bf16 (slow)"]
    assert [table.name for table in told.tables] == ["runs", "settings", "environment"]
    assert told.title == "Report of runs"


def test_the_folder_of_a_comparison_stands_for_its_runs(tmp_path):
    """Under the names of its arms, FP16 with a setting beside FP16; no run that has not begun."""
    home = tmp_path / "compared"
    for arm, mode in (("fp32", "fp32"), ("fp16", "fp16"), ("fp16-scale-8", "fp16")):
        make_run(home / arm / "seed-0", mode=mode)
    plan = {"arms": ["fp32", "fp16", "fp16:scale=8", "bf16"], "seeds": [0, 1]}
    (home / "compare.json").write_text(json.dumps(plan))
    other = make_run(tmp_path / "mine", mode="bf16")
    found = [(run.arm, run.path.name) for run in name_arms([home, other])]
    assert found == [
        ("fp32", "seed-0"), ("fp16", "seed-0"), ("fp16:scale=8", "seed-0"), ("bf16", "mine"),
    ]  # fmt: skip


def test_the_gap_is_to_the_same_seed(paths):
    """FP32 has none; BF16's is 0 where its losses are FP32's."""
    told = tell(in_order(name_arms(paths)))
    gaps = {run.label: dict(run.gap) for run in told.runs}
    assert gaps["fp32, seed 0"] == {}
    assert set(gaps["bf16, seed 1"].values()) == {0.0}


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    """By its name."""
    with pytest.raises(ConfigError, match="no run.json"):
        make_report([tmp_path], tmp_path / "out")


def test_runs_that_never_reported_to_wandb_are_refused(paths, tmp_path):
    """A report of curves that W&B does not have would be empty; `json` sends nothing."""
    runs = in_order(name_arms(paths))
    told = tell(runs)
    with pytest.raises(ConfigError) as refused:
        send_report(told, runs, "draft", tmp_path)
    assert refused.value.found == "no run that reported to W&B"
    assert "report_to: [wandb]" in refused.value.expected
    assert refused.value.where == "--wandb_report draft"
    assert "--wandb_report json" in refused.value.action
    if importlib.util.find_spec("wandb_workspaces") is not None:
        sent = json.loads(Path(send_report(told, runs, "json", tmp_path)).read_text())
        assert (sent["projectName"], sent["entityName"]) == ("mprecipes", "")


def test_runs_whose_folders_have_one_name(tmp_path):
    """As many parts of their paths as tell them apart; one that is named twice is one run."""
    paths = [make_run(tmp_path / name / "run", num_steps=20) for name in ("x", "y")]
    paths.append(make_run(tmp_path / "x" / "other", num_steps=20, mode="bf16"))
    runs = name_arms([*paths, tmp_path / "y" / ".." / "x" / "run"])
    assert [run.arm for run in runs] == ["fp32 (x/run)", "fp32 (y/run)", "bf16"]


@pytest.mark.parametrize(
    ("plan", "found"),
    [("{", "JSONDecodeError"), ('{"schema": 1}', "KeyError: 'arms'"), ("[]", "TypeError")],
)
def test_a_damaged_plan_is_refused(tmp_path, plan, found):
    """With its place, and the way around it."""
    (tmp_path / "compare.json").write_text(plan)
    with pytest.raises(ConfigError) as refused:
        make_report([tmp_path], tmp_path / "report")
    assert refused.value.found.startswith(found)
    assert "arms and seeds" in refused.value.expected
    assert refused.value.where == str(tmp_path / "compare.json")
    assert "run folders themselves" in refused.value.action


def test_a_comparison_without_a_run_is_refused(tmp_path):
    """A page about nothing is not written."""
    (tmp_path / "compare.json").write_text('{"arms": ["fp32"], "seeds": [0]}')
    with pytest.raises(ConfigError) as refused:
        make_report([tmp_path], tmp_path / "report")
    assert refused.value.found == "no run that has begun"
    assert refused.value.where == str(tmp_path)
    assert refused.value.expected and refused.value.action
    assert not (tmp_path / "report").exists()


def test_hostile_names_do_no_harm(tmp_path):
    """Tags, formulas, table signs and other scripts are shown as they are, and nowhere run."""
    odd = "<script>alert(1)<b> $x^{2$ |a| *b* `c` [d](e) \u4f60 "
    paths = [
        make_run(tmp_path / f"{odd}{i}", num_steps=20, note="</script><img src=x onerror=alert(1)>")
        for i in range(2)
    ]  # fmt: skip
    written, _ = make_report(paths, tmp_path / "report", title=odd)
    page, text = written.html.read_text(), written.markdown.read_text()
    assert "<script>alert" not in page and "<img src=x" not in page
    assert page.count("<script") == page.count("</script>") == 1
    assert "&lt;script&gt;alert(1)&lt;b&gt; $x^{2$ |a|" in page
    assert "<script>" not in text
    assert (
        "&lt;script&gt;alert(1)&lt;b&gt; $x^{2$ \\|a\\| \\*b\\* \\`c\\` [d]\\(e) &#20320;" in text
    )
