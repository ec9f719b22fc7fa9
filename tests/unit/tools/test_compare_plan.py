# SPDX-License-Identifier: Apache-2.0
"""Arms are read as they are meant, and every run gets the same but for its arm and seed."""

import json
import re

import pytest

from mprecipes.compute.policy import numerics_policy
from mprecipes.errors import ConfigError
from mprecipes.identity.config import parse_config
from mprecipes.tools.compare_plan import (
    evaluate_every,
    parse_arms,
    parse_seeds,
    plan_jobs,
    read_options,
    spelled,
)
from tests.fix64 import RECIPE, ROOT
from tests.house_rules import load_config_class


def test_arms_with_their_settings():
    """FP32 goes first; `scale` and a bare pattern are short forms; several patterns by `+`."""
    arms = parse_arms("bf16:keep_in_fp32=norm+*.head, fp16:scale=1024,fp32,fp8:fp8_recipe=rowwise")
    assert [(arm.name, arm.mode, dict(arm.numerics)) for arm in arms] == [
        ("fp32", "fp32", {}),
        ("bf16:keep_in_fp32=norm+*.head", "bf16", {"keep_in_fp32": ["*norm*", "*.head"]}),
        ("fp16:scale=1024", "fp16", {"loss_scale": 1024}),
        ("fp8:fp8_recipe=rowwise", "fp8", {"fp8_recipe": "rowwise"}),
    ]
    assert arms[1].slug == "bf16-keep_in_fp32-norm+-.head"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-7", 1e-7),
        ("1024", 1024),
        ("0.5", 0.5),
        ("true", True),
        ("none", None),
        ("bf16", "bf16"),
    ],
)
def test_values_are_numbers_where_they_look_like_one(text, value):
    """1e-7 is a number, though YAML reads a text."""
    assert parse_arms(f"fp32,bf16:x={text}")[1].numerics == {"x": value}


def test_a_mode_twice_is_two_arms():
    """The second has a name and a folder of its own."""
    assert [(arm.name, arm.slug) for arm in parse_arms("fp32,fp32,bf16")] == [
        ("fp32", "fp32"), ("fp32#2", "fp32-2"), ("bf16", "bf16"),
    ]  # fmt: skip


def test_arms_that_differ_by_a_wildcard_have_folders_of_their_own():
    """What a file name cannot hold is told apart by a digest of the arm's name."""
    patterns = ["proj", "*proj", "proj*", "?proj", "[pq]roj", "*proj*"]
    arms = parse_arms(",".join(["fp32", *(f"bf16:keep_in_fp32={each}" for each in patterns)]))
    slugs = [arm.slug for arm in arms]
    assert slugs[:3] == ["fp32", "bf16-keep_in_fp32-proj", "bf16-keep_in_fp32-proj-144050"]
    assert len(set(slugs)) == 7
    assert all(re.fullmatch(r"[A-Za-z0-9._+-]+", slug) for slug in slugs)


@pytest.mark.parametrize(
    ("text", "found", "expected"),
    [
        ("fp32,bf16:a=b-c,bf16:a=b=c", "'bf16:a=b=c'", "its own, not that of bf16:a=b-c"),
        ("fp32,bf17", "'bf17'", "a mode of fp32, tf32, bf16, fp16, fp8"),
        ("fp32,fp16:scale", "'fp16:scale'", "settings as name=value"),
        ("bf16,fp16", "'bf16,fp16'", "fp32 among them"),
        ("fp32,bf16:grad_accum=bf16", "'bf16:grad_accum=bf16'", "for tests"),
    ],
)
def test_arms_that_cannot_be(text, found, expected):
    """Each message says which arm, what would be right, where and what to do."""
    with pytest.raises(ConfigError) as refused:
        parse_arms(text)
    assert found in refused.value.found
    assert expected in refused.value.expected
    assert refused.value.where == "--precisions"
    assert refused.value.action


def test_planted_modes_are_for_tests_alone(monkeypatch, tmp_path):
    """With the variable of the tests they are let through, to the recipe's environment."""
    monkeypatch.setenv("MPRECIPES_ALLOW_PLANTED", "1")
    arms = parse_arms("fp32,bf16:grad_accum=bf16")
    jobs, _ = plan_jobs(arms, [0], folder=tmp_path, config=None, arguments=[], steps=6)
    assert [job.variables for job in jobs] == [{}, {"MPRECIPES_PLANTED": "grad_accum=bf16"}]


@pytest.mark.parametrize("text", ["", "0,x", "-1", "1.5"])
def test_seeds_are_numbers(text):
    """Anything else is refused."""
    assert parse_seeds("0, 2,2,1") == [0, 2, 1]
    with pytest.raises(ConfigError) as refused:
        parse_seeds(text)
    assert refused.value.where == "--seeds"


def test_runs_differ_in_precision_seed_and_folder_only(tmp_path):
    """Seed by seed, so that an arm and its FP32 are trained close in time."""
    config = tmp_path / "tiny.yaml"
    config.write_text("max_steps: 300\nnumerics: {numerics_steps: 7}\n")
    arms = parse_arms("fp32,fp16:scale=8,fp8")
    jobs, steps = plan_jobs(
        arms, [0, 1], folder=tmp_path, config=config, arguments=["--weight_decay", "0.5"], steps=60
    )
    assert steps == 60
    assert [job.label for job in jobs][:4] == [
        "fp32, seed 0", "fp16:scale=8, seed 0", "fp8, seed 0", "fp32, seed 1",
    ]  # fmt: skip
    common = ["--config", str(config), "--weight_decay", "0.5", "--max_steps", "60",
              "--eval_steps", "10"]  # fmt: skip
    assert all(job.words[:8] == common for job in jobs)
    words = jobs[1].words[8:]
    assert words[:4] == ["--precision", "fp16", "--seed", "0"]
    assert json.loads(words[5]) == {"numerics_steps": 7, "loss_scale": 8}
    assert words[6:] == ["--output_dir", str(tmp_path / "fp16-scale-8" / "seed-0")]
    assert "--allow_unvalidated_fp8" in jobs[2].words


def test_the_number_of_steps_comes_from_the_config(tmp_path):
    """Or from the options; without one nothing is begun."""
    config = tmp_path / "tiny.yaml"
    config.write_text("max_steps: 300\n")
    plan = {"folder": tmp_path, "arguments": [], "steps": None}
    arms = parse_arms("fp32")
    assert plan_jobs(arms, [0], **{**plan, "config": config})[1] == 300
    plan["config"] = None
    assert plan_jobs(arms, [0], **{**plan, "arguments": ["--max_steps=12"]})[1] == 12
    with pytest.raises(ConfigError) as refused:
        plan_jobs(arms, [0], **plan)
    assert "--steps" in refused.value.where and "--steps 60" in refused.value.action


@pytest.mark.parametrize("word", ["--seed", "--precision=bf16", "--output_dir"])
def test_what_the_comparison_sets_is_not_taken_twice(tmp_path, word):
    """The recipe's own spelling of the command's options is refused."""
    with pytest.raises(ConfigError) as refused:
        plan_jobs(parse_arms("fp32"), [0], folder=tmp_path, config=None, arguments=[word, "1"],
                  steps=6)  # fmt: skip
    assert word.split("=")[0] in refused.value.found
    assert "--precisions" in refused.value.action


def test_names_of_options_may_be_typed_with_dashes(tmp_path):
    """As a recipe takes them: the steps are read, the evaluations kept; values stay as they are."""
    typed = ["--max-steps", "10", "--eval-steps=5", "--run-name=a-b", "--labels", "c-d", "-1"]
    assert spelled(typed) == [
        "--max_steps", "10", "--eval_steps=5", "--run_name=a-b", "--labels", "c-d", "-1",
    ]  # fmt: skip
    assert read_options(None, typed)["max_steps"] == "10"
    jobs, steps = plan_jobs(parse_arms("fp32"), [0], folder=tmp_path, config=None,
                            arguments=typed, steps=None)  # fmt: skip
    assert steps == 10
    assert jobs[0].words.count("--eval_steps=5") == 1 and "--eval_steps" not in jobs[0].words
    with pytest.raises(ConfigError, match="--output_dir for the recipe"):
        plan_jobs(parse_arms("fp32"), [0], folder=tmp_path, config=None,
                  arguments=["--output-dir", "x"], steps=10)  # fmt: skip


def numerics_of(folder, *typed, yaml="", arm="fp16:scale=8"):
    """Gives the settings that an arm's launch is given, beside those of a config and typed ones."""
    (folder / "c.yaml").write_text(yaml)
    jobs, _ = plan_jobs(parse_arms(f"fp32,{arm}"), [0], folder=folder, config=folder / "c.yaml",
                        arguments=typed, steps=6)  # fmt: skip
    words = jobs[1].words
    return json.loads(words[len(words) - words[::-1].index("--numerics")])


def test_an_arms_settings_are_added_to_the_configs(tmp_path):
    """Numbers stay numbers, none is none, and the command line wins."""
    yaml = "numerics: {max_skipped: 1e4, loss_scale: 2}\n"
    assert numerics_of(tmp_path, yaml=yaml) == {"max_skipped": 1e4, "loss_scale": 8}
    for nothing in ("none", "null"):
        assert numerics_of(tmp_path, "--numerics", nothing, yaml=yaml) == {"loss_scale": 8}
        assert numerics_of(tmp_path, yaml=f"numerics: {nothing}\n") == {"loss_scale": 8}
    assert numerics_of(tmp_path, '--numerics={"a": 1e-7}') == {"a": 1e-7, "loss_scale": 8}


@pytest.mark.parametrize(
    ("typed", "yaml"),
    [(["--numerics", "{a: ["], ""), (["--numerics", "7"], ""), ([], "numerics: [1]\n"),
     ([], "numerics: {a: yes}\n")],
)  # fmt: skip
def test_settings_that_cannot_be_read_are_refused(tmp_path, typed, yaml):
    """Before anything is trained, as the recipe itself would refuse them."""
    with pytest.raises(ConfigError) as refused:
        numerics_of(tmp_path, *typed, yaml=yaml)
    assert refused.value.found.startswith("numerics is ")
    assert refused.value.where == "--numerics, or numerics of the config"
    assert refused.value.expected and refused.value.action


def test_options_of_a_file_that_is_none(tmp_path):
    """Missing, and no mapping."""
    (tmp_path / "torn.yaml").write_text("a: [\n")
    with pytest.raises(ConfigError, match="--config"):
        read_options(tmp_path / "torn.yaml", [])
    with pytest.raises(ConfigError, match="No such file"):
        read_options(tmp_path / "none.yaml", [])
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="--config"):
        read_options(tmp_path / "list.yaml", [])


@pytest.mark.parametrize(("steps", "every"), [(60, 10), (300, 50), (50, 5), (7, 1), (3, 1)])
def test_the_last_step_is_evaluated(steps, every):
    """A divisor of the steps, at most a sixth of them."""
    assert evaluate_every(steps) == every


@pytest.mark.parametrize(
    "arm",
    ["fp32", "bf16", "fp16", "fp16:scale=1", "fp16:scale=1e-7", "bf16:keep_in_fp32=norm",
     "fp8", "fp8:fp8_recipe=tensorwise"],
)  # fmt: skip
def test_the_recipe_takes_every_arm(tmp_path, arm):
    """Its own parser and the checks of numerics accept the command line of each arm."""
    config = ROOT / "recipes" / "configs" / "pretrain_causal_lm" / "tiny-cpu.yaml"
    jobs, _ = plan_jobs(parse_arms(f"fp32,{arm}"), [3], folder=tmp_path, config=config,
                        arguments=["--save_steps", "30"], steps=60)  # fmt: skip
    asked, origins = parse_config(load_config_class(RECIPE), jobs[-1].words)
    assert (asked.seed, asked.max_steps, asked.eval_steps) == (3, 60, 10)
    assert asked.precision == arm.split(":")[0]
    assert asked.output_dir == str(jobs[-1].run)
    assert origins.allow_unvalidated_fp8 == arm.startswith("fp8")
    policy = numerics_policy(asked)
    if arm == "fp16:scale=1e-7":
        assert policy.loss_scale == 1e-7
    if arm == "bf16:keep_in_fp32=norm":
        assert policy.keep_in_fp32 == ("*norm*",)
