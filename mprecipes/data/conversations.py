# SPDX-License-Identifier: Apache-2.0
"""Conversations from files, folders, `datasets` or the standard library, each with its line.

A row has one of these shapes, recognised by its keys or named by the option `format`:

- `messages`: `messages` (or `conversations` with `from` and `value`), optionally `tools` and
  `system`; an assistant's message with `weight: 0` is shown and not learned.
- `prompt_completion`: `prompt` and `completion`, both text, or both lists of messages.
- `instruction`: `instruction` and `output`, optionally `input` and `system`.

A value is never cast or repaired: a row that is none of these, or whose text is no string of valid
Unicode, is refused with `file:line`, or left out and counted.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mprecipes.data.corpus import STDLIB, Corpus, open_corpus
from mprecipes.data.docstrings import DOCSTRINGS, docstring_pairs
from mprecipes.data.objects import read_objects
from mprecipes.data.rows import BadRow
from mprecipes.errors import ConfigError, DataError

FORMATS = ("auto", "messages", "prompt_completion", "instruction")
_SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """One row.

    Attributes:
        messages: dicts with `role` and `content`; empty where the row is plain text.
        tools: JSON schemas the template may show.
        num_prompt: how many of the messages are the prompt, where the row says so.
        text: prompt and completion of a row of plain text, to which no template is applied.
    """

    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    num_prompt: int | None = None
    text: tuple[str, str] | None = None
    where: str = ""


@dataclass
class Conversations:
    """The conversations of one source; each iteration starts anew and counts `skipped` afresh."""

    corpus: Corpus
    name: str
    format: str
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def content_digest(self) -> str:
        return self.corpus.content_digest

    def __iter__(self) -> Iterator[Conversation]:
        self.skipped.clear()
        if self.name == DOCSTRINGS:
            for doc, code, where in docstring_pairs(iter(self.corpus)):
                asked = {"role": "user", "content": f"Write this Python function:\n{doc}"}
                yield Conversation(
                    [asked, {"role": "assistant", "content": code}], num_prompt=1, where=where
                )
            return
        for shown, path, kind in self.corpus.files:
            if kind == ".txt":
                self.refuse(BadRow("a text file", "no rows with fields", 1), shown)
                continue
            for row in read_objects(path, kind):
                try:
                    if isinstance(row, BadRow):
                        raise row
                    conversation = _parsed(row[0], self.format, row[1], f"{shown}:{row[1]}")
                except BadRow as bad:
                    self.refuse(bad, shown)
                    continue
                yield conversation

    def refuse(self, row: BadRow, shown: str) -> None:
        """Counts a bad row, or raises.

        Raises:
            DataError: `on_bad_rows` is refuse.
        """
        if self.corpus.on_bad_rows == "refuse":
            where = f"{shown}:{row.line}" if row.line else shown
            raise DataError(
                f"{row.reason}: {row.found}",
                expected="a row with messages, prompt and completion, or instruction and output, "
                "each text a string of valid UTF-8, that the chat template can show",
                where=where,
                action="correct the row, or have bad rows left out and counted: "
                "chat: {on_bad_rows: skip}",
            ) from row
        self.skipped[row.reason] += 1


def open_conversations(
    source: str,
    *,
    format: str = "auto",
    on_bad_rows: str = "refuse",
    digest_cache: Path | None = None,
) -> Conversations:
    """Finds out what `source` is: `docstrings`, or anything with rows that `open_corpus` knows.

    Raises:
        DataError: there is no such source.
        ConfigError: an unknown format.
    """
    if format not in FORMATS:
        raise ConfigError(
            f"format {format!r}",
            expected=f"one of {', '.join(FORMATS)}",
            where="format in option chat",
            action="write one of these, or leave it out",
        )
    name = STDLIB if source == DOCSTRINGS else source
    corpus = open_corpus(name, on_bad_rows=on_bad_rows, digest_cache=digest_cache)
    return Conversations(corpus, source, format)


def _parsed(row: dict[str, Any], format: str, line: int, where: str) -> Conversation:
    kind = _kind(row, line) if format == "auto" else format
    if kind == "messages":
        key = "messages" if "messages" in row else "conversations"
        messages = _with_system(row, _messages(row.get(key), key, line), line)
        return Conversation(messages, _tools(row, line), where=where)
    if kind == "instruction":
        if row.get("history"):
            raise BadRow("unknown field", "history: earlier turns, which are messages", line)
        parts = [_text(row.get("instruction"), "instruction", line)]
        if row.get("input"):
            parts.append(_text(row["input"], "input", line))
        messages = _with_system(row, [{"role": "user", "content": "\n\n".join(parts)}], line)
        answer = {"role": "assistant", "content": _text(row.get("output"), "output", line)}
        if not answer["content"]:
            raise BadRow("empty completion", "an output of no characters", line)
        return Conversation([*messages, answer], num_prompt=len(messages), where=where)
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        asked = _with_system(row, _messages(prompt, "prompt", line), line)
        answered = _messages(completion, "completion", line)
        return Conversation(asked + answered, _tools(row, line), len(asked), where=where)
    if row.get("system"):
        raise BadRow("unknown field", "system, beside a prompt that is plain text", line)
    text = (_text(prompt, "prompt", line), _text(completion, "completion", line))
    if not text[1]:
        raise BadRow("empty completion", "a completion of no characters", line)
    return Conversation(text=text, where=where)


def _kind(row: dict[str, Any], line: int) -> str:
    if "messages" in row or "conversations" in row:
        return "messages"
    if "prompt" in row and "completion" in row:
        return "prompt_completion"
    if "instruction" in row and "output" in row:
        return "instruction"
    raise BadRow("unknown format", f"the fields {', '.join(row) or 'none'}", line)


def _messages(value: Any, field: str, line: int) -> list[Message]:
    if not isinstance(value, list) or not value:
        found = f"{field} is {'an empty list' if value == [] else f'a {type(value).__name__}'}"
        raise BadRow("no messages", found, line)
    return [_message(each, f"{field}[{index}]", line) for index, each in enumerate(value)]


def _with_system(row: dict[str, Any], messages: list[Message], line: int) -> list[Message]:
    """Puts the row's own `system` before its messages, where it has one."""
    if not row.get("system"):
        return messages
    if messages[0]["role"] == "system":
        raise BadRow("two system messages", "system, and messages that begin with one", line)
    return [{"role": "system", "content": _text(row["system"], "system", line)}, *messages]


def _message(value: Any, field: str, line: int) -> Message:
    if not isinstance(value, dict):
        raise BadRow("not a message", f"{field} is a {type(value).__name__}", line)
    if "from" in value and "role" not in value:
        speaker = value["from"]
        if speaker not in _SHAREGPT or "value" not in value:
            raise BadRow("not a message", f"{field} is from {speaker!r}", line)
        value = {"role": _SHAREGPT[speaker], "content": value["value"]}
    role = _text(value.get("role"), f"{field}.role", line)
    message = {**value, "role": role}
    if "content" in value or not value.get("tool_calls"):
        message["content"] = _text(value.get("content"), f"{field}.content", line)
    if message.get("weight", 1) not in (0, 1):
        raise BadRow("not a weight", f"{field}.weight is {message['weight']!r}, not 0 or 1", line)
    for text in strings_of(message):
        _text(text, field, line)
    return message


def strings_of(value: Any) -> Iterator[str]:
    """Gives every string in a JSON value, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from strings_of(each)


def _tools(row: dict[str, Any], line: int) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str):  # data sets whose tools differ in shape hold them as JSON text
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRow("broken JSON", f"tools: {error}", line) from None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("no list of tools", f"tools is a {type(tools).__name__}", line)
    return tools


def _text(value: Any, field: str, line: int) -> str:
    if not isinstance(value, str):
        kind = "nothing" if value is None else f"a value of type {type(value).__name__}"
        raise BadRow("text is not a string", f"{field} is {kind}", line)
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        raise BadRow("bad UTF-8", f"{field} holds half of a surrogate pair", line)
    return value
