# SPDX-License-Identifier: Apache-2.0
"""The drill's table, summary, picture and progress say what was found."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from mprecipes.tools.drill import DrillResult, Kill
from mprecipes.tools.drill_compare import Row
from mprecipes.tools.drill_report import Picture, Watch, draw, summary_of, table_of

EQUAL = [Row("loss", 12, "steps"), Row("replayed steps", 0, "steps", may_be_empty=True)]
FIRST = {"where": "weights/lm_head[7]", "expected": "0x1.0p+0", "found": "0x1.8p+0"}
DIFFERENT = Row("parameters", 3_200_000, "elements", 2, FIRST)


def result(*rows: Row, **changes) -> DrillResult:
    facts = {
        "recipe": "pretrain_causal_lm@1.0.0", "status": "official", "sha256": "0" * 64,
        "precision": "bf16", "num_processes": 2, "arguments": [], "last_step": 12,
        "kill_seed": None, "kills": [Kill(attempt=0, step=7, during="step", resumed_from=4)],
        "rows": list(rows), "seconds": {"reference": 9.5, "killed": 6.25, "resumed": 7.0},
        "folder": Path("runs/drill"),
    }  # fmt: skip
    return DrillResult(**{**facts, **changes})


def text_of(renderable) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_table_of_equal_runs():
    """An equal row shows its count, and a row without anything to compare says so."""
    text = text_of(table_of(result(*EQUAL)))
    assert "12 steps" in text
    assert "none to compare" in text
    assert "different" not in text
    assert "pretrain_causal_lm@1.0.0 (official), bf16" in text


def test_table_names_the_first_difference():
    """A row that differs shows how many, where first, what was expected and what was found."""
    text = text_of(table_of(result(*EQUAL, DIFFERENT)))
    for part in ("3,200,000 elements", "2 different", "weights/lm_head[7]", "0x1.0p+0", "0x1.8p+0"):
        assert part in text


def test_summary():
    """The summary names kills, wall times, the verdict and the files."""
    text = summary_of(result(*EQUAL))
    assert "killed at the end of step 7, went on from the checkpoint of step 4" in text
    assert "reference 9.5 s, killed 6.2 s, resumed 7.0 s" in text
    assert "EQUAL: all 2 comparisons, bit for bit, over 12 steps" in text
    assert "drill.json" in text
    text = summary_of(result(*EQUAL, DIFFERENT, kill_seed=5))
    assert "DIFFERENT: 1 of 3 comparisons" in text
    assert "--kill_seed 5" in text


def test_summary_of_a_save_killed_before_any_checkpoint():
    """A kill inside the first save restarts the run, and the summary says both."""
    text = summary_of(result(*EQUAL, kills=[Kill(0, 4, "save", 0)]))
    assert "killed in the save of step 4, started again" in text


def losses(first: int, last: int) -> dict[int, float]:
    return {step: 5.0 - step / 16 for step in range(first, last + 1)}


@pytest.mark.parametrize("kills", [[(7, 4, "step")], [(4, 0, "save"), (9, 8, "step")]])
def test_picture_is_drawn(tmp_path, kills):
    """The picture is a PNG of 1500 x 900 pixels, for one kill and for two."""
    attempts = [losses(1, 7), losses(5, 12)] if len(kills) == 1 else [
        losses(1, 4), losses(1, 9), losses(9, 12)]  # fmt: skip
    path = tmp_path / "drill.png"
    draw(path, Picture("recipe@1.0.0", "bit for bit equal", True, losses(1, 12), attempts, kills))
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1500, 900)


def test_picture_of_differing_and_broken_losses(tmp_path):
    """Losses that differ, are not finite, or belong to no reference step are drawn, not a crash."""
    attempts = [losses(1, 3), {3: 4.0, 4: float("nan"), 5: float("inf"), 13: 1.0}, {}]
    picture = Picture("recipe@1.0.0", "DIFFERENT", False, losses(1, 12), attempts, [(3, 2, "step")])
    draw(tmp_path / "drill.png", picture)
    assert (tmp_path / "drill.png").stat().st_size > 10_000


def test_progress_without_a_terminal(tmp_path):
    """Without a terminal each launch is a plain start line and end line."""
    out = io.StringIO()
    watch = Watch(Console(file=out, width=100))
    with watch.following("reference", tmp_path / "reference"):
        watch.record({"step": 1, "loss": 5.5})
    lines = out.getvalue().splitlines()
    assert lines[0].split() == ["reference", "launching", "into", "reference/"]
    assert lines[-1].startswith("reference  ended after ")


def test_progress_on_a_terminal(tmp_path):
    """On a terminal a bar shows step and loss; a loss that is not finite is shown, not a crash."""
    out = io.StringIO()
    watch = Watch(Console(file=out, width=100, force_terminal=True))
    watch.expect(12)
    with watch.following("resumed", tmp_path / "interrupted"):
        watch.record({"step": 6, "loss": "nan"})
        watch.record({"step": 7, "loss": 4.5625})
    assert "7/12" in out.getvalue()
    assert "loss 4.5625" in out.getvalue()


def test_silent_progress(tmp_path, capsys):
    """Without a console nothing is printed."""
    watch = Watch(None)
    with watch.following("reference", tmp_path):
        watch.record({"step": 1, "loss": 5.5})
    watch.say("text")
    assert capsys.readouterr() == ("", "")
