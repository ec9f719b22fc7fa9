# SPDX-License-Identifier: Apache-2.0
"""The shapes of rows, and what is refused with its line."""

import json

import pytest

from mprecipes.data.conversations import open_conversations, strings_of
from mprecipes.errors import ConfigError, DataError

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def written(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_each_shape_is_told_by_its_keys(tmp_path):
    """Messages, ShareGPT, prompt and completion of both kinds, instruction with more or less."""
    source = written(
        tmp_path,
        {"messages": CHAT, "tools": '[{"name": "look"}]'},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "p", "completion": "c"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"instruction": "a", "output": "b", "input": "x", "system": "s"},
        {"instruction": "a", "output": "b", "input": ""},
    )
    rows = list(open_conversations(source))
    assert [row.messages for row in rows[:2]] == [CHAT, CHAT]
    assert rows[0].tools == [{"name": "look"}]
    assert rows[2].text == ("p", "c")
    assert (rows[3].messages, rows[3].num_prompt) == (CHAT, 1)
    assert [each["content"] for each in rows[4].messages] == ["s", "a\n\nx", "b"]
    assert (rows[4].num_prompt, rows[5].num_prompt) == (2, 1)
    assert rows[5].messages == CHAT
    assert rows[5].where == f"{source}:6"


def test_a_system_text_beside_the_messages_comes_first(tmp_path):
    """It is no other field that may be ignored; an empty one is none."""
    system = {"role": "system", "content": "s"}
    source = written(
        tmp_path,
        {"messages": CHAT, "system": "s"},
        {"system": "s", "conversations": [{"from": "human", "value": "a"}]},
        {"prompt": CHAT[:1], "completion": CHAT[1:], "system": "s"},
        {"messages": CHAT, "system": ""},
        {"messages": CHAT, "system": None},
    )
    rows = list(open_conversations(source))
    assert [row.messages for row in rows[:2]] == [[system, *CHAT], [system, CHAT[0]]]
    assert (rows[2].messages, rows[2].num_prompt) == ([system, *CHAT], 2)
    assert [row.messages for row in rows[3:]] == [CHAT, CHAT]


def test_calls_without_content_keep_their_nulls(tmp_path):
    """content: null beside tool_calls is none; a null among a call's arguments is a value."""
    call = {"function": {"name": "f", "arguments": {"x": None}}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    tools = [{"name": "f", "parameters": {"default": None}}]
    [row] = open_conversations(written(tmp_path, {"messages": [CHAT[0], asked], "tools": tools}))
    assert row.messages[1] == {"role": "assistant", "tool_calls": [call]}
    assert row.tools == tools


BAD = [
    ({"text": "x"}, "unknown format"),
    ({"messages": []}, "no messages"),
    ({"messages": "x"}, "no messages"),
    ({"messages": [5]}, "not a message"),
    ({"messages": [{"role": "user", "content": 5}]}, "text is not a string"),
    ({"messages": [{"role": "user"}]}, "text is not a string"),
    ({"messages": [{"content": "a"}]}, "text is not a string"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "bad UTF-8"),
    ({"conversations": [{"from": "bystander", "value": "a"}]}, "not a message"),
    ({"messages": CHAT, "tools": "{"}, "broken JSON"),
    ({"messages": CHAT, "tools": 3}, "no list of tools"),
    ({"prompt": "p", "completion": ""}, "empty completion"),
    ({"prompt": "p", "completion": CHAT}, "text is not a string"),
    ({"instruction": "a", "output": 1}, "text is not a string"),
    ({"instruction": "a", "output": ""}, "empty completion"),
    ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "unknown field"),
    ({"prompt": "p", "completion": "c", "system": "s"}, "unknown field"),
    ({"messages": [{"role": "system", "content": "s"}, *CHAT], "system": "t"},
     "two system messages"),
    ({"messages": CHAT, "system": 5}, "text is not a string"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
     "text is not a string"),
    ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, "not a weight"),
    ({"messages": [CHAT[0], {"role": "assistant", "tool_calls": []}]}, "text is not a string"),
    ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, "text is not a string"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), BAD, ids=range(len(BAD)))
def test_bad_rows_are_refused_with_their_line_or_counted(tmp_path, row, reason):
    """Refused at line 2 by default; asked to skip, the good row is used and the reason counted."""
    source = written(tmp_path, {"messages": CHAT}, row)
    with pytest.raises(DataError) as error:
        list(open_conversations(source))
    assert error.value.found.startswith(f"{reason}: ")
    assert "messages" in error.value.expected
    assert error.value.where == f"{source}:2"
    assert "on_bad_rows: skip" in error.value.action
    opened = open_conversations(source, on_bad_rows="skip")
    assert len(list(opened)) == 1
    assert opened.skipped == {reason: 1}


def test_a_named_format_is_not_guessed(tmp_path):
    """With a format named, another shape is a bad row; an unknown name is refused."""
    source = written(tmp_path, {"messages": CHAT})
    with pytest.raises(DataError):
        list(open_conversations(source, format="instruction"))
    with pytest.raises(ConfigError) as error:
        open_conversations(source, format="alpaca")
    assert error.value.found == "format 'alpaca'"
    assert "prompt_completion" in error.value.expected
    assert error.value.where == "format in option chat"
    assert "leave it out" in error.value.action


def test_a_text_file_has_no_conversations(tmp_path):
    """A .txt file is refused, not read as one conversation."""
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError) as error:
        list(open_conversations(str(tmp_path / "a.txt")))
    assert "a text file" in error.value.found


def test_the_embedded_conversations():
    """docstrings asks for a function of the standard library and answers with its code."""
    first = next(iter(open_conversations("docstrings")))
    assert first.messages[0]["content"].startswith("Write this Python function:\n")
    assert "def " in first.messages[1]["content"]
    assert (first.num_prompt, first.where.split("/")[0]) == (1, "stdlib")


def test_strings_of_a_value():
    """Every string at any depth, keys left out."""
    assert list(strings_of({"a": ["x", {"b": "y"}], "c": 1, "d": "z"})) == ["x", "y", "z"]
