# SPDX-License-Identifier: Apache-2.0
"""Words are read as one thing or refused; values are checked against their type."""

from typing import Any, Literal, Union

import pytest
import yaml

from mprecipes.errors import ConfigError
from mprecipes.identity.values import (
    Ambiguous,
    Refused,
    check_value,
    describe_type,
    read_argument,
    read_word,
    read_yaml,
    write_yaml,
)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("12", 12),
        ("-3", -3),
        ("1_000", 1000),
        ("0x10", 16),
        ("0", 0),
        ("2e-5", 2e-05),
        ("1E3", 1000.0),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_0.5", 10.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("bf16", "bf16"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
    ],
)
def test_word_with_one_meaning(word, value):
    """A word that every reader reads alike has that value and type."""
    found = read_word(word)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("word", ["no", "Yes", "on", "OFF", "none", "None", "010", "-007", "0o17"])
def test_word_of_two_meanings_stays_ambiguous(word):
    """A word that readers disagree about is kept as it was typed."""
    assert read_word(word) == Ambiguous(word)


@pytest.mark.parametrize("word", ["1:30", "12:30:45", "2026-11-30", "2026-11-30T10:00:00Z"])
def test_base_60_and_dates_stay_ambiguous(word):
    """PyYAML makes 90 of 1:30 and a date object of a date; here both stay words."""
    assert read_word(word) == Ambiguous(word)


@pytest.mark.parametrize(
    ("value", "kind", "checked"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (2e-5, float, 2e-05),
        (True, bool, True),
        (Ambiguous("no"), bool, False),
        (Ambiguous("On"), bool, True),
        ("no", str, "no"),
        (None, int | None, None),
        (None, Union[int, None], None),  # noqa: UP007
        (Ambiguous("none"), str | None, None),
        (Ambiguous("none"), Literal["none", "wandb"], "none"),
        ("bf16", Literal["bf16", "fp32"], "bf16"),
        (["a", "b"], list[str], ["a", "b"]),
        ([1, 2], list[int], [1, 2]),
        ({"a": {"b": [1, None, "x"]}}, dict[str, Any], {"a": {"b": [1, None, "x"]}}),
    ],
)
def test_right_value_passes(value, kind, checked):
    """A value of the option's type passes; int becomes float and nothing else is converted."""
    found = check_value(value, kind)
    assert (found, type(found)) == (checked, type(checked))


@pytest.mark.parametrize(
    ("value", "kind", "found", "expected", "action"),
    [
        (1000.0, int, "1000.0 (number)", "a whole number", "write 1000"),
        (True, int, "true (true/false)", "a whole number", "write a whole number"),
        (True, float, "true (true/false)", "a finite number", "write a finite number"),
        (1, bool, "1 (whole number)", "true or false", "write true or false"),
        ("3", int, "'3' (text)", "a whole number", "remove the quotes"),
        ("2e-5", float, "'2e-5' (text)", "a finite number", "remove the quotes"),
        (2**63, int, "9223372036854775808 (whole", "a whole number", "write a whole number"),
        (10**400, float, "1000000", "a finite number", "write a finite number"),
        (float("nan"), float, "nan (number)", "a finite number", "write a finite number"),
        (float("inf"), float, "inf (number)", "a finite number", "write a finite number"),
        (None, int, "none", "a whole number", "write a whole number"),
        (7, str, "7 (whole number)", "text", "put the value in quotes"),
        (False, str, "false (true/false)", "text", "put the value in quotes"),
        (Ambiguous("no"), str, "no (an unquoted word)", "text", "put it in quotes"),
        (Ambiguous("010"), int, "010 (an unquoted", "a whole number", "drop the leading zero"),
        (Ambiguous("1:30"), int, "1:30 (an unquoted", "a whole number", "write one number"),
        (Ambiguous("none"), str, "none (an unquoted word)", "text", "put it in quotes"),
        ("fp8", Literal["a", "b"], "'fp8' (text)", "one of a, b", "write one of a, b"),
        ("bfloat16", Literal["bf16", "fp8"], "'bfloat16'", "one of bf16, fp8", "write bf16"),
        (Ambiguous("off"), Literal["off", "x"], "off (an unq", "one of off, x", "in quotes"),
        (5, list[int], "5 (whole number)", "a list, each a whole number", "write [5]"),
        ([1, "x"], list[int], "'x' (text)", "a whole number", "write a whole number"),
        ([1], dict[str, Any], "[1] (list)", "a mapping", "write a mapping"),
        ({"a": Ambiguous("no")}, dict[str, Any], "no (an unq", "a value that every", "quotes"),
        ({"a": float("nan")}, dict[str, Any], "nan", "a value that every", "a finite number"),
    ],
)
def test_wrong_value_is_refused(value, kind, found, expected, action):
    """A refusal names the value found, what was expected and what to write."""
    with pytest.raises(Refused) as caught:
        check_value(value, kind)
    assert found in caught.value.found
    assert expected in caught.value.expected
    assert action in caught.value.action


@pytest.mark.parametrize(
    ("words", "kind", "value"),
    [
        ("none", int | None, None),
        ("None", str | None, None),
        ("none", Literal["none", "x"], "none"),
        (["none"], list[str] | None, None),
        ("007", str, "007"),
        ("no", str, "no"),
        ("2e-5", float, 2e-05),
        (["1", "2"], list[int], [1, 2]),
        (["1", "2"], list[str], ["1", "2"]),
        ([], list[str], []),
        ('{"a": 1e-6}', dict[str, Any], {"a": 1e-06}),
    ],
)
def test_words_of_the_command_line(words, kind, value):
    """Text is taken as typed, numbers as YAML reads them, `none` is None, a mapping is JSON."""
    assert read_argument(words, kind) == value


@pytest.mark.parametrize("text", ["{a: 1}", '{"a": 1, "a": 2}', '{"a": NaN}'])
def test_json_on_the_command_line_is_strict(text):
    """A mapping that is not JSON, repeats a name or holds NaN is refused."""
    with pytest.raises(Refused) as caught:
        read_argument(text, dict[str, Any])
    assert text in caught.value.found
    assert "a mapping (JSON text on the command line)" in caught.value.expected
    assert "write a JSON object" in caught.value.action


def test_type_an_option_cannot_have_is_our_own_error():
    """An unsupported annotation in a recipe fails for its author, at once."""
    with pytest.raises(AssertionError, match="an option has one type"):
        describe_type(int | str)
    with pytest.raises(AssertionError, match="not a type an option can have"):
        describe_type(set)


def test_yaml_gives_values_with_their_lines(tmp_path):
    """Each option comes with the line it stands on; quotes keep text text."""
    path = tmp_path / "a.yaml"
    path.write_text("# comment\nlr: 2e-5\n\nname: 'no'\nsizes: [1, 2]\nmodel:\n  eps: 1e-6\n")
    assert read_yaml(path) == {
        "lr": (2e-05, 2),
        "name": ("no", 4),
        "sizes": ([1, 2], 5),
        "model": ({"eps": 1e-06}, 6),
    }


def test_empty_yaml_sets_nothing(tmp_path):
    """A file of comments only is a config that changes nothing."""
    (tmp_path / "a.yaml").write_text("# nothing yet\n")
    assert read_yaml(tmp_path / "a.yaml") == {}


@pytest.mark.parametrize(
    ("content", "found", "line"),
    [
        (b"a: 1\nb: 2\na: 3\n", "'a' given twice, first on line 1", 3),
        (b"m:\n  a: 1\n  a: 2\n", "'a' given twice, first on line 2", 3),
        (b"m: {a: 1}\nx: [1\n", "expected ',' or ']'", 3),
        (b"on: 1\n", "the name 'on' is not text; put it in quotes", 1),
        (b"1: x\n", "the name '1' is not text", 1),
        (b"a: 1\n\tb: 2\n", "found character", 2),
        (b"a: !!python/object:os.system x\n", "could not determine a constructor", 1),
        (b"a: *nothing\n", "found undefined alias 'nothing'", 1),
        (b"- a\n- b\n", "in place of `option: value` lines", None),
        (b"just text\n", "found 'just text' in place of", None),
        (b"a: 1\n---\nb: 2\n", "but found another document", 2),
        (b"a: \xff\n", "'utf-8' codec can't decode", None),
    ],
)
def test_bad_yaml_is_refused_with_its_line(tmp_path, content, found, line):
    """A file that is not one mapping of unique names is refused, with file and line."""
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert found in caught.value.found
    assert "each option once" in caught.value.expected
    assert caught.value.where == (f"{path}:{line}" if line else str(path))
    assert caught.value.action == (
        "correct that line" if line else "check the path after --config, and the file"
    )


def test_missing_yaml_is_refused(tmp_path):
    """A path that leads nowhere is refused by name."""
    with pytest.raises(ConfigError) as caught:
        read_yaml(tmp_path / "none.yaml")
    assert caught.value.found == "the file cannot be read (No such file or directory)"
    assert caught.value.where.endswith("none.yaml")


@pytest.mark.parametrize(
    "value",
    [
        1,
        -0.0,
        2e-05,
        1e300,
        True,
        None,
        "text",
        "no",
        "none",
        "None",
        "010",
        "1:30",
        "2e-5",
        "2026-11-30",
        "null",
        "",
        "two\nlines",
        "a: b # c",
        "'q\"",
        "\u00e9\U0001f600",
        [],
        ["a", "no"],
        {"eps": 1e-06, "list": [1, {"b": "off"}], "none": None},
        "x" * 300,
    ],
)
def test_written_yaml_reads_back_equal(tmp_path, value):
    """A value is one line of YAML that we, and plain PyYAML, read back as the same value."""
    text = f"a: {write_yaml(value)}\n"
    assert text.count("\n") == 1
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    found = read_yaml(tmp_path / "a.yaml")["a"][0]
    assert (found, type(found)) == (value, type(value))
    assert yaml.safe_load(text) == {"a": value}
