# SPDX-License-Identifier: Apache-2.0
"""A config is merged in the documented order, and nothing in it is guessed or ignored."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from mprecipes.errors import ConfigError
from mprecipes.identity.config import (
    config_to_dict,
    dump_yaml,
    end_dry_run,
    option,
    parse_config,
    render_config,
    resume_classes,
)
from mprecipes.identity.values import nearest_name


@dataclass(kw_only=True)
class Config:
    """A small recipe's options, one of every type."""

    output_dir: str = option(help="folder of the run", resume="free")
    learning_rate: float = option(2e-3, help="peak, 100% of it", minimum=0.0, maximum=1.0)
    max_steps: int = option(10, help="optimizer steps", minimum=1)
    eval_steps: int | None = option(None, help="steps between evaluations", minimum=1)
    shuffle: bool = option(True, help="shuffle the data")
    compile: bool = option(False, help="compile the model")
    precision: Literal["auto", "bf16", "fp32"] = option("auto", help="compute dtype")
    schedule: str = option("cosine", help="decay", choices=["cosine", "linear"])
    tokenizer: str | None = option(None, help="tokenizer", resume="must_match")
    labels: list[str] = option([], help="words beside the run")
    sizes: list[int] = option([1, 2], help="sizes", minimum=1)
    model_config: dict[str, Any] = option({"hidden": 8}, help="model fields")


def parse(*words, yaml=None, tmp_path=None):
    argv = ["--output_dir", "o", *words]
    if yaml is not None:
        (tmp_path / "a.yaml").write_text(yaml, encoding="utf-8")
        argv += ["--config", str(tmp_path / "a.yaml")]
    return parse_config(Config, argv)


def refusal(*words, yaml=None, tmp_path=None):
    with pytest.raises(ConfigError) as caught:
        parse(*words, yaml=yaml, tmp_path=tmp_path)
    return caught.value


def test_defaults_stand_where_nothing_is_said():
    """Without YAML and flags every option has its default, and says so."""
    config, origins = parse()
    assert config == Config(output_dir="o")
    assert config.model_config == {"hidden": 8}
    assert set(origins.values()) == {"default", "command line"}
    assert origins["output_dir"] == "command line"
    assert origins["max_steps"] == "default"


def test_command_line_beats_yaml_beats_dataclass(tmp_path):
    """Each source overrides the ones before it, and each value knows its source."""
    yaml = "max_steps: 20\nlearning_rate: 0.5\n"
    config, origins = parse("--max_steps", "30", yaml=yaml, tmp_path=tmp_path)
    assert (config.max_steps, config.learning_rate, config.schedule) == (30, 0.5, "cosine")
    assert origins["max_steps"] == "command line"
    assert origins["learning_rate"] == str(tmp_path / "a.yaml")
    assert origins["schedule"] == "default"


def test_mutable_defaults_are_not_shared():
    """A recipe that changes a list of one config does not change the next one."""
    first, _ = parse()
    first.labels.append("x")
    first.model_config["hidden"] = 9
    second, _ = parse()
    assert (second.labels, second.model_config) == ([], {"hidden": 8})


def test_yaml_exponent_without_a_point_is_a_number(tmp_path):
    """`2e-5`, which PyYAML reads as text, is the number 0.00002 for a float option."""
    config, _ = parse(yaml="learning_rate: 2e-5\n", tmp_path=tmp_path)
    assert config.learning_rate == 0.00002
    assert type(config.learning_rate) is float


def test_yaml_exponent_inside_a_mapping_is_a_number(tmp_path):
    """A model field `1e-6` reaches the model as a number, not as text."""
    config, _ = parse(yaml="model_config: {eps: 1e-6}\n", tmp_path=tmp_path)
    assert config.model_config == {"eps": 0.000001}


@pytest.mark.parametrize("word", ["no", "off", "yes", "on"])
def test_yaml_switch_word_for_text_is_refused(tmp_path, word):
    """`no` and its like, which PyYAML reads as booleans, are refused where text is expected."""
    error = refusal(yaml=f"max_steps: 5\ntokenizer: {word}\n", tmp_path=tmp_path)
    assert error.found == f"tokenizer is {word} (an unquoted word)"
    assert error.expected == "text or none"
    assert error.where == f"tokenizer in {tmp_path / 'a.yaml'}:2"
    assert error.action == "tokenizer: put it in quotes if it is text, or write true or false"


def test_yaml_switch_word_for_a_choice_is_refused(tmp_path):
    """`precision: no` is refused with the words that are allowed, never read as False."""
    error = refusal(yaml="precision: no\n", tmp_path=tmp_path)
    assert error.found == "precision is no (an unquoted word)"
    assert error.expected == "one of auto, bf16, fp32"
    assert "a.yaml:1" in error.where
    assert error.action == "precision: write one of auto, bf16, fp32"


def test_a_second_config_file_is_refused():
    """The last one would win, and everything in the first be ignored."""
    error = refusal("--config", "base.yaml", "--config", "mine.yaml")
    assert error.found == "--config base.yaml and mine.yaml"
    assert error.expected == "one file: files are not merged"
    assert error.where == "command line" and "--option VALUE" in error.action


def test_a_path_from_the_home_folder_is_written_out(tmp_path, monkeypatch):
    """`~/runs` in a YAML, or after `--name=`, is no folder called `~` in the working directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text("tokenizer: ~/tokens\n")
    words = ["--config", str(tmp_path / "a.yaml"), "--output_dir=~/runs/a"]
    config, _ = parse_config(Config, words)
    assert config.output_dir == str(tmp_path / "runs" / "a")
    assert config.tokenizer == str(tmp_path / "tokens")


def test_yaml_octal_is_refused(tmp_path):
    """`010`, which PyYAML reads as 8, is refused."""
    error = refusal(yaml="max_steps: 010\n", tmp_path=tmp_path)
    assert error.found == "max_steps is 010 (an unquoted word)"
    assert error.expected == "a whole number"
    assert "a.yaml:1" in error.where
    assert error.action == "max_steps: drop the leading zero (YAML reads it as octal)"


def test_yaml_underscore_groups_digits(tmp_path):
    """`1_000` is a thousand for every reader, and a thousand here."""
    assert parse(yaml="max_steps: 1_000\n", tmp_path=tmp_path)[0].max_steps == 1000


def test_yaml_base_60_is_refused(tmp_path):
    """`1:30`, which PyYAML reads as 90, is refused."""
    error = refusal(yaml="max_steps: 1:30\n", tmp_path=tmp_path)
    assert error.found == "max_steps is 1:30 (an unquoted word)"
    assert error.action == "max_steps: write one number (YAML reads base 60)"


def test_yaml_date_for_text_is_refused(tmp_path):
    """An unquoted date, which PyYAML reads as a date object, is refused for text."""
    assert "2026-11-30" in refusal(yaml="tokenizer: 2026-11-30\n", tmp_path=tmp_path).found


def test_yaml_duplicate_key_is_refused(tmp_path):
    """An option given twice, of which PyYAML keeps the last, is refused with both lines."""
    error = refusal(yaml="max_steps: 1\nshuffle: true\nmax_steps: 2\n", tmp_path=tmp_path)
    assert error.found == "'max_steps' given twice, first on line 1"
    assert error.where.endswith("a.yaml:3")
    assert "each option once" in error.expected
    assert error.action == "correct that line"


def test_yaml_unknown_key_names_the_nearest(tmp_path):
    """A misspelt key is refused with the name that was probably meant, its file and line."""
    error = refusal(yaml="shuffle: true\nmax_step: 4\n", tmp_path=tmp_path)
    assert error.found == "unknown option max_step"
    assert error.expected == "max_steps"
    assert error.where == f"{tmp_path / 'a.yaml'}:2"
    assert error.action == "write max_steps, or remove it"


@pytest.mark.parametrize(
    ("yaml", "found"),
    [
        ("max_steps: 1.0\n", "max_steps is 1.0 (number)"),
        ("max_steps: 1e3\n", "max_steps is 1000.0 (number)"),
        ("max_steps: true\n", "max_steps is true (true/false)"),
        ("max_steps: '5'\n", "max_steps is '5' (text)"),
        ("max_steps:\n", "max_steps is none"),
        ("max_steps: 99999999999999999999\n", "max_steps is 99999999999999999999 (whole number)"),
        ("learning_rate: .nan\n", "learning_rate is nan (number)"),
        ("learning_rate: .inf\n", "learning_rate is inf (number)"),
        ("learning_rate: 1e999\n", "learning_rate is inf (number)"),
        ("learning_rate: fast\n", "learning_rate is 'fast' (text)"),
        ("shuffle: 1\n", "shuffle is 1 (whole number)"),
        ("schedule: true\n", "schedule is true (true/false)"),
        ("labels: changed_seed\n", "labels is 'changed_seed' (text)"),
        ("labels: [1]\n", "labels is 1 (whole number)"),
        ("model_config: small\n", "model_config is 'small' (text)"),
        ("model_config: {bias: no}\n", "model_config is no (an unquoted word)"),
    ],
)
def test_yaml_wrong_type_is_refused(tmp_path, yaml, found):
    """Every wrong type is refused with the value found, file and line; none is converted."""
    error = refusal(yaml=yaml, tmp_path=tmp_path)
    assert error.found == found
    assert "a.yaml:1" in error.where
    assert error.expected
    assert error.action.startswith(yaml.partition(":")[0] + ": ")


def test_yaml_int_for_a_float_becomes_float(tmp_path):
    """`learning_rate: 1` is 1.0."""
    config, _ = parse(yaml="learning_rate: 1\n", tmp_path=tmp_path)
    assert (config.learning_rate, type(config.learning_rate)) == (1.0, float)


def test_yaml_none_means_none_where_none_is_allowed(tmp_path):
    """`none`, `None`, `null` and nothing at all are None, never the text."""
    for word in ("none", "None", "null", "~", ""):
        assert parse(yaml=f"tokenizer: {word}\n", tmp_path=tmp_path)[0].tokenizer is None
    assert parse(yaml="tokenizer: 'none'\n", tmp_path=tmp_path)[0].tokenizer == "none"


def test_none_on_the_command_line_is_none(tmp_path):
    """`none` switches off what YAML switched on."""
    config, origins = parse("--eval_steps", "none", yaml="eval_steps: 5\n", tmp_path=tmp_path)
    assert config.eval_steps is None
    assert origins["eval_steps"] == "command line"


def test_none_for_an_option_that_needs_a_value_is_refused():
    """`none` is refused where there is no off."""
    error = refusal("--max_steps", "none")
    assert error.found == "max_steps is none"
    assert error.expected == "a whole number"
    assert error.where == "--max_steps on the command line"
    assert error.action == "--max_steps: write a whole number"


@pytest.mark.parametrize(
    ("words", "shuffle", "compile"),
    [
        (["--compile"], True, True),
        (["--compile", "true", "--shuffle", "false"], False, True),
        (["--shuffle=False", "--compile=TRUE"], False, True),
        (["--no_shuffle", "--no-compile"], False, False),
    ],
)
def test_switches_on_the_command_line(words, shuffle, compile):
    """A switch is given bare, with true or false, or with `no_` before its name."""
    config, _ = parse(*words)
    assert (config.shuffle, config.compile) == (shuffle, compile)


def test_lists_mappings_and_hyphens_on_the_command_line():
    """Lists take several words, mappings JSON, and hyphens do for underscores."""
    config, _ = parse("--labels", "a", "b", "--sizes=3", "--model-config", '{"eps": 1e-6}')
    assert (config.labels, config.sizes, config.model_config) == (["a", "b"], [3], {"eps": 1e-06})


@pytest.mark.parametrize(
    ("words", "found", "expected"),
    [
        (["--lr", "1"], "unknown option --lr", "--learning_rate"),
        (["--max-step=3"], "unknown option --max-step", "--max_steps"),
        (["--max_s", "3"], "unknown option --max_s", "--max_steps"),
        (["--dryrun"], "unknown option --dryrun", "--dry_run"),
        (["--qqqq"], "unknown option --qqqq", "one of output_dir, learning_rate"),
        (["stray"], "'stray' belongs to no option", "--option VALUE"),
        (["--max_steps"], "argument --max_steps: expected one argument", "--option VALUE"),
    ],
)
def test_unknown_words_are_refused_with_the_nearest(words, found, expected):
    """An unknown flag names the nearest one; abbreviations and stray words are refused."""
    error = refusal(*words)
    assert error.found == found
    assert error.expected.startswith(expected)
    assert error.where == "command line"
    assert error.action


@pytest.mark.parametrize(
    ("words", "found", "expected", "action"),
    [
        (["--max_steps", "0"], "max_steps is 0", "at least 1", "--max_steps: write 1 or more"),
        (["--learning_rate=-1e-3"], "learning_rate is -0.001", "0.0 to 1.0", "write 0.0 or more"),
        (["--learning_rate", "2"], "learning_rate is 2.0", "0.0 to 1.0", "write 1.0 or less"),
        (["--sizes", "1", "0"], "sizes is 0", "at least 1", "--sizes: write 1 or more"),
        (["--schedule", "cosin"], "is 'cosin'", "one of cosine, linear", "write cosine"),
        (["--precision", "fp8"], "is 'fp8' (text)", "one of auto, bf16, fp32", "write one of"),
    ],
)
def test_limits_and_choices_are_kept(words, found, expected, action):
    """A value outside its limits or choices is refused with what would be allowed."""
    error = refusal(*words)
    assert found in error.found
    assert error.expected == expected
    assert error.where == f"{words[0].partition('=')[0]} on the command line"
    assert action in error.action


def test_missing_option_is_named():
    """An option without a default that nobody gives is refused, with what it is for."""
    with pytest.raises(ConfigError) as caught:
        parse_config(Config, [])
    assert caught.value.found == "output_dir is not set"
    assert caught.value.expected == "text: folder of the run"
    assert caught.value.where == "option output_dir"
    assert "--output_dir VALUE" in caught.value.action


def test_wrong_default_is_refused_like_any_value():
    """Defaults are checked after the merge, too, and named as the recipe's."""

    @dataclass(kw_only=True)
    class Wrong:
        rate: float = option(5.0, help="rate", maximum=1.0)

    with pytest.raises(ConfigError) as caught:
        parse_config(Wrong, [])
    assert caught.value.where == "the default of rate in Wrong"
    assert (caught.value.found, caught.value.expected) == ("rate is 5.0", "at most 1.0")
    assert caught.value.action == "rate: write 1.0 or less"


def test_dump_round_trips(tmp_path):
    """What is dumped is parsed back as the same config, traps included."""
    config = Config(
        output_dir="no",
        learning_rate=1e-05,
        tokenizer="none",
        labels=["010", "1e5"],
        model_config={"eps": 1e-06, "act": "off"},
    )
    (tmp_path / "a.yaml").write_text(dump_yaml(config), encoding="utf-8")
    again, _ = parse_config(Config, ["--config", str(tmp_path / "a.yaml")])
    assert again == config


def test_config_as_dict_keeps_the_order_of_fields():
    """The JSON-safe form has every option, in the recipe's order, and shares nothing."""
    config = Config(output_dir="o")
    values = config_to_dict(config)
    assert list(values)[:3] == ["output_dir", "learning_rate", "max_steps"]
    values["labels"].append("x")
    assert config.labels == []


def test_rendered_config_carries_origins():
    """Each line of the run folder's config says where its value came from."""
    text = render_config({"a": 1, "name": "no"}, {"a": "default", "name": "x.yaml"})
    assert text == 'a: 1        # default\nname: "no"  # x.yaml\n'


def test_dry_run_prints_values_and_origins_and_stops(tmp_path, monkeypatch, capsys):
    """`--dry_run` prints on rank 0 what would run, as YAML that launches it, and exits 0."""
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as caught:
        end_dry_run(*parse("--dry_run", yaml="max_steps: 7\n", tmp_path=tmp_path))
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    lines = dict(line.split(": ", 1) for line in printed.splitlines()[1:])
    assert [part.strip() for part in lines["max_steps"].split("  # ")] == [
        "7",
        f"{tmp_path}/a.yaml",
    ]
    assert lines["output_dir"].endswith("# command line")
    assert lines["precision"].endswith("# default")
    (tmp_path / "again.yaml").write_text(printed, encoding="utf-8")
    again, _ = parse_config(Config, ["--config", str(tmp_path / "again.yaml")])
    assert again == Config(output_dir="o", max_steps=7)
    end_dry_run(*parse())
    assert capsys.readouterr().out == ""


def test_dry_run_is_silent_on_other_ranks(monkeypatch, capsys):
    """Only rank 0 prints the config."""
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as caught:
        end_dry_run(*parse("--dry_run"))
    assert (caught.value.code, capsys.readouterr().out) == (0, "")


def test_help_lists_every_option_with_its_default(capsys):
    """`--help` shows the recipe's docstring, each option once with its default, and exits 0."""
    with pytest.raises(SystemExit) as caught:
        parse_config(Config, ["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "nothing in it is guessed or ignored" in text
    assert "--learning_rate FLOAT" in text
    assert "peak, 100% of it (default: 0.002)" in text
    assert "folder of the run (required)" in text
    assert "(default: none)" in text
    assert "--precision {auto,bf16,fp32}" in text
    assert "--config FILE" in text
    assert "--learning-rate" not in text


def test_resume_classes_of_options():
    """Each option says whether a resumed run may change it; silence means with a flag."""
    classes = resume_classes(Config)
    assert (classes["output_dir"], classes["tokenizer"]) == ("free", "must_match")
    assert classes["max_steps"] == "may_change"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("learning_rat", "learning_rate"),
        ("lr", "learning_rate"),
        ("wd", "weight_decay"),
        ("batch_size", "train_batch_size"),
        ("Weight-Decay", "weight_decay"),
        ("zzz", None),
    ],
)
def test_nearest_name(name, meant):
    """A name is matched by spelling, by initials or as a part, and by nothing else."""
    names = ["learning_rate", "weight_decay", "train_batch_size"]
    assert nearest_name(name, names) == meant


def test_importing_config_does_not_import_transformers():
    """Tools that only read a run folder do not wait for transformers."""
    code = "import sys, mprecipes.identity.config; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_accepted_changes_are_words_about_this_launch_alone():
    """`--accept a b` is in no config and no YAML; it stands beside the origins."""
    config, origins = parse("--accept", "changed_seed", "changed_data")
    assert origins.accepted == ("changed_seed", "changed_data")
    assert "accept" not in config_to_dict(config)
    assert parse()[1].accepted == ()


def test_unvalidated_fp8_is_allowed_for_one_launch():
    """The flag stands beside the origins and in no config."""
    config, origins = parse("--allow_unvalidated_fp8")
    assert origins.allow_unvalidated_fp8 is True
    assert "allow_unvalidated_fp8" not in config_to_dict(config)
    assert parse()[1].allow_unvalidated_fp8 is False


def test_a_list_given_in_parts_is_all_of_them():
    """`--accept a --accept b c` accepts all three, and so do the recipe's own lists."""
    words = ["--accept", "changed_seed", "--accept", "changed_data", "changed_order"]
    config, origins = parse(*words, "--labels", "a", "--labels", "b", "c", "--sizes=3")
    assert origins.accepted == ("changed_seed", "changed_data", "changed_order")
    assert config.labels == ["a", "b", "c"]
    assert config.sizes == [3], "typed values stand in place of the default"


@pytest.mark.parametrize("words", [("--resume_from", "-5"), ("--resume-from=-1",)])
def test_no_run_resumes_from_before_its_beginning(words):
    """A step to resume from is 0 or more."""
    error = refusal(*words)
    assert error.found == f"resume_from is {words[-1].rpartition('=')[2]}"
    assert (error.expected, error.where) == ("at least 0", "--resume_from on the command line")
    assert parse("--resume_from", "0")[1].resume_from == 0


def test_the_step_to_resume_from_is_a_flag_of_this_launch_alone():
    """A whole number or nothing; no option of the run."""
    config, origins = parse("--resume_from", "500")
    assert origins.resume_from == 500
    assert "resume_from" not in config_to_dict(config)
    assert parse()[1].resume_from is None
    error = refusal("--resume_from", "last")
    assert error.found == "resume_from is 'last' (text)"
    assert error.expected == "a whole number"
    assert error.where == "--resume_from on the command line"
    assert error.action
