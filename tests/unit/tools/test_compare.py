# SPDX-License-Identifier: Apache-2.0
"""A comparison from its command to its verdicts, with launches that train nothing."""

import json
import sys
from pathlib import Path

import pytest

from mprecipes.errors import ConfigError
from mprecipes.tools.compare import find_recipe, run_compare
from tests import compare_stand_in
from tests.fix64 import RECIPE, ROOT

LAUNCHER = [sys.executable, "-m", "tests.compare_stand_in"]


@pytest.fixture
def compare(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(compare_stand_in.__file__).parents[1])

    def run(acts="", **changes):
        asked = {"precisions": "fp32,bf16,fp16", "seeds": "0,1", "steps": 12, "recipe": RECIPE}
        arguments = ["--acts", acts] if acts else []
        return run_compare(tmp_path / "out", **{**asked, **changes}, arguments=arguments,
                           launcher=LAUNCHER)  # fmt: skip

    return run


def words(done):
    return {judged.group: judged.word for judged in done.story.judged}


def test_every_arm_gets_its_verdict(compare, tmp_path):
    """A fast one, one that does not fit, one of another order; report and plan are on disk."""
    done = compare("bf16=fast,fp16=oom,fp8=order", precisions="fp32,bf16,fp16,fp8")
    assert words(done) == {
        "fp32": "reference", "bf16": "equivalent", "fp16": "out of memory", "fp8": "not comparable",
    }  # fmt: skip
    assert not done.is_whole
    plan = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert (plan["arms"], plan["seeds"], plan["steps"]) == (
        ["fp32", "bf16", "fp16", "fp8"], [0, 1], 12,
    )  # fmt: skip
    assert done.written.html.exists()


def test_more_seeds_later(compare):
    """One seed gives no verdict; a second one is added and does."""
    first = compare("bf16=fast", precisions="fp32,bf16", seeds="0")
    assert words(first) == {"fp32": "reference", "bf16": "not enough seeds"}
    assert words(compare("bf16=fast", precisions="fp32,bf16", seeds="0,1"))["bf16"] == "equivalent"


def test_an_arm_that_was_refused_is_told(compare):
    """It never had a folder; the others are judged."""
    done = compare("fp16=refuse,bf16=fast")
    assert words(done) == {"fp32": "reference", "bf16": "equivalent", "fp16": "incomplete"}
    reason = {judged.group: judged.reason for judged in done.story.judged}["fp16"]
    assert "refused" in reason and "said why" in reason


def test_another_plan_in_the_same_folder_is_refused(compare):
    """Fewer steps would not compare with what is there."""
    compare(precisions="fp32", seeds="0")
    with pytest.raises(ConfigError) as refused:
        compare(precisions="fp32", seeds="0", steps=6)
    assert refused.value.found == "steps is 6; of this folder's comparison it is 12"
    assert "same recipe" in refused.value.expected
    assert refused.value.where.endswith("compare.json")
    assert "new --output_dir" in refused.value.action


def test_an_output_dir_that_is_a_file_is_refused(compare, tmp_path):
    """A path that cannot be a folder is named, and nothing is launched."""
    (tmp_path / "out").write_text("x")
    with pytest.raises(ConfigError) as refused:
        compare(precisions="fp32", seeds="0")
    assert refused.value.found == "no folder can be made here (File exists)"
    assert refused.value.where == f"--output_dir {tmp_path / 'out'}"
    assert "another --output_dir" in refused.value.action and refused.value.expected


def test_the_largest_batch_of_each_arm(compare, tmp_path):
    """FP32 fits with 4 of 8, BF16 with 8, FP16 never: that is an outcome; the batches are kept."""
    config = tmp_path / "tiny.yaml"
    config.write_text("global_batch_size: 8\n")
    changes = {"batch": "largest", "config": config, "seeds": "0"}
    done = compare("fp32=big=4,bf16=big=8,fp16=oom", **changes)
    batches = json.loads((tmp_path / "out" / "batches.json").read_text())
    assert batches == {"fp32": 4, "bf16": 8, "fp16": 1}
    assert words(done) == {
        "fp32": "reference", "bf16": "not enough seeds", "fp16": "out of memory",
    }  # fmt: skip
    assert not list((tmp_path / "out").glob("*/fit-*"))
    before = (tmp_path / "out" / "batches.json").stat().st_mtime_ns
    compare("fp32=big=4,bf16=big=8,fp16=oom", **changes)
    assert (tmp_path / "out" / "batches.json").stat().st_mtime_ns == before


def test_the_recipe_of_a_config():
    """The folder of its config names it; without either there is none."""
    config = ROOT / "recipes" / "configs" / "pretrain_causal_lm" / "tiny-cpu.yaml"
    assert find_recipe(None, config) == RECIPE
    for recipe, found in ((None, "no recipe"), (Path("none.py"), "no such file")):
        with pytest.raises(ConfigError) as refused:
            find_recipe(recipe, None)
        assert refused.value.found == found
        assert "recipes/configs/" in refused.value.expected
