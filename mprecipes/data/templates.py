# SPDX-License-Identifier: Apache-2.0
"""A chat template applied to a conversation: its text, and which of it the assistant said.

Two ways, both exact:

- *marks*: the template has `{% generation %}` blocks; what they hold is taken as it is. It is found
  by rendering again with a text at each end, also where a macro or a filter holds the block (there
  transformers 5.24 gives the place inside of the macro as if it were that in the row).
- *prefixes*: else an assistant's turn is what the template adds to the rendering of the messages
  before it with the generation prompt: what a model is asked to continue. It ends behind its last
  special token (white space that follows is the template's). Each rendering must be a prefix of
  the next one and of the whole row, or the row is refused; nothing is searched for or guessed.

Text of the row that reads like a special token is replaced before rendering and put back after it,
so that which of them the template wrote is known; `Rendered.pieces` tells them apart.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from mprecipes.data.conversations import Conversation, Message, strings_of
from mprecipes.data.rows import BadRow

Span = tuple[int, int]
PLAIN = (  # for tokenizers without a template, bytes above all
    "{% for message in messages %}{{ message['role'] + ':\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_SENTINEL, _BEGIN, _END = "QMPRSPECIAL{}Q", "QMPRBEGINQ", "QMPRENDQ"
_OWN = "QMPR"  # what all of these begin with
# A block like the one it stands for: white space around it is the template's in the same way.
_MACRO = "{% macro qmpr_marked() %}" + _BEGIN + "{{ caller() }}" + _END + "{% endmacro %}\n"
_DATE = "{% macro strftime_now(_) %}{{ date_string }}{% endmacro %}\n"
_HINT = "put generation marks into the template"


def _call(mark: re.Match[str]) -> str:
    return f"{{%{mark[1]} {'endcall' if mark[2] else 'call qmpr_marked()'} {mark[3]}%}}"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        pieces: what the text is made of, in order: (text, whether it is a special token).
        turns: one span (begin, end) of the text for each assistant turn's targets.
        is_clean: no text of the row reads like a special token.
        neutral: the same text with such text replaced.
    """

    pieces: list[tuple[str, bool]]
    turns: list[list[Span]]
    is_clean: bool
    neutral: str

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


class ChatTemplate:
    """A chat template with the special tokens of its tokenizer.

    Args:
        text: of the template.
        special: every special token of the tokenizer.
        names: values the template may use: `bos_token`, `eos_token` and the like.
    """

    def __init__(self, text: str, special: Sequence[str], names: Mapping[str, Any]) -> None:
        self._names = dict(names)
        if "date_string" in names:  # also for a template that asks the clock all the same
            text = _DATE + text
        self.text = text
        self.has_marks = _MARK.search(text) is not None
        self._marked = _MACRO + _MARK.sub(_call, text)
        by_length = sorted(special, key=lambda token: (-len(token), token))
        self._special = by_length
        self._specials = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None = None, *, ask: bool = False
    ) -> str:
        """Gives the text of messages; with `ask` the assistant's turn is begun.

        Raises:
            BadRow: the template refuses the messages.
        """
        return self._render(self.text, messages, tools, ask)

    def __call__(self, conversation: Conversation) -> Rendered:
        """Renders a conversation and finds the assistant's turns.

        Raises:
            BadRow: the template refuses it, or its turns cannot be told exactly.
        """
        messages, tools = conversation.messages, conversation.tools
        if tools is not None and "tools" not in self.text:
            raise BadRow("tools", "tools, of which the chat template knows nothing", 0)
        if "tool_calls" not in self.text and any(each.get("tool_calls") for each in messages):
            raise BadRow("tools", "tool_calls, of which the chat template knows nothing", 0)
        neutral, is_clean = self._neutral(messages)
        text = self.render(neutral, tools)
        says = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
        if not says:
            raise BadRow("no assistant turn", "messages without the role assistant", 0)
        if self.has_marks:
            marked = self._render(self._marked, neutral, tools, False)
            turns = self._by_marks(text, marked, len(says))
        else:
            turns = [[self._by_prefixes(neutral, tools, index, text)] for index in says]
        if is_clean:
            return Rendered(list(self._split(text)), turns, True, text)
        pieces, moved = self._restore(text)
        if "".join(piece for piece, _ in pieces) != self.render(messages, tools):
            found = "text that reads like a special token, which the template treats as one"
            raise BadRow("special-token text", found, 0)
        spans = [[(moved(begin), moved(end)) for begin, end in turn] for turn in turns]
        return Rendered(pieces, spans, False, text)

    def _render(
        self, template: str, messages: Sequence[Message], tools: list[Any] | None, ask: bool
    ) -> str:
        try:
            rendered: Any = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=template,
                add_generation_prompt=ask,
                **self._names,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            found = f"the chat template refuses it ({type(error).__name__}: {error})"
            raise BadRow("refused by the chat template", found, 0) from error
        return rendered[0][0]

    def _by_marks(self, text: str, marked: str, num_turns: int) -> list[list[Span]]:
        parts = re.split(f"({_BEGIN}|{_END})", marked)
        kinds, at, ends = parts[1::2], 0, []
        for part in parts[::2]:
            at += len(part)
            ends.append(at)
        if "".join(parts[::2]) != text or kinds != [_BEGIN, _END] * (len(kinds) // 2):
            found = "the template writes something else where its generation marks are looked for"
            raise BadRow("no exact targets", found, 0)
        spans = [(begin, end) for begin, end in zip(ends[::2], ends[1::2]) if end > begin]
        if not spans:
            found = "the template's generation marks hold no text of this row"
            raise BadRow("no targets", found, 0)
        if len(spans) == num_turns:
            return [[span] for span in spans]
        return [spans]  # which block is of which turn is not known; all of them are targets

    def _by_prefixes(
        self, messages: Sequence[Message], tools: list[Any] | None, index: int, whole: str
    ) -> Span:
        try:
            before = self.render(messages[:index], tools, ask=True)
            through = self.render(messages[: index + 1], tools)
        except BadRow as bad:
            found = f"message {index}: of what comes before it alone, {bad.found}"
            raise BadRow("no exact targets", f"{found}; {_HINT}", 0) from bad
        if not through.startswith(before) or not whole.startswith(through):
            found = (
                f"message {index}: the template writes it otherwise once it is asked for or more "
                "follows, so that its targets are not known"
            )
            raise BadRow("no exact targets", f"{found}; {_HINT}", 0)
        ends = [each.end() for each in self._specials.finditer(through, len(before))]
        if not ends or through[ends[-1] :].strip():
            found = f"message {index} ends without a special token: a model could not learn to stop"
            raise BadRow("no end of turn", found, 0)
        return len(before), ends[-1]

    def _neutral(self, messages: Sequence[Message]) -> tuple[Sequence[Message], bool]:
        """Gives the messages with text that reads like a special token replaced, if there is any.

        Raises:
            BadRow: they hold the replacement itself.
        """
        strings = list(strings_of(list(messages)))
        has_special = any(self._specials.search(text) for text in strings)
        if (has_special or self.has_marks) and any(_OWN in text for text in strings):
            raise BadRow("special-token text", f"the text {_OWN}, which stands for tokens here", 0)
        if not has_special:
            return messages, True

        def replaced(value: Any) -> Any:
            if isinstance(value, str):
                return self._specials.sub(
                    lambda match: _SENTINEL.format(self._special.index(match[0])), value
                )
            if isinstance(value, dict):
                return {k: v if k == "role" else replaced(v) for k, v in value.items()}
            return [replaced(each) for each in value] if isinstance(value, list) else value

        return [replaced(message) for message in messages], False

    def _split(self, text: str) -> Iterator[tuple[str, bool]]:
        at = 0
        for match in self._specials.finditer(text):
            if match.start() > at:
                yield text[at : match.start()], False
            yield match[0], True
            at = match.end()
        if at < len(text):
            yield text[at:], False

    def _restore(self, neutral: str) -> tuple[list[tuple[str, bool]], Any]:
        """Puts replaced text back; gives the pieces and where each place of `neutral` is now."""
        before, _, after = _SENTINEL.partition("{}")
        sentinel = re.compile(f"{before}(\\d+){after}")
        ends, added = [], []
        for match in sentinel.finditer(neutral):
            ends.append(match.end())
            added.append(len(self._special[int(match[1])]) - len(match[0]))

        def moved(place: int) -> int:
            return place + sum(more for end, more in zip(ends, added) if end <= place)

        pieces = [
            (sentinel.sub(lambda match: self._special[int(match[1])], text), is_special)
            for text, is_special in self._split(neutral)
        ]
        return pieces, moved
