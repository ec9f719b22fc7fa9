# SPDX-License-Identifier: Apache-2.0
"""A conversation as token ids and targets: which tokens of it a model is trained to say.

Promises: the ids are those of `apply_chat_template(tokenize=True)`, with one BOS and no EOS that
the template did not write; text of a row never becomes a special token; a target is a token that
holds a character of what the assistant said, its end token included, and never the first token of
a conversation, which nothing predicts. A row for which this cannot be shown is refused, with the
reason, never masked by a guess.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mprecipes.data.conversations import Conversation
from mprecipes.data.rows import BadRow
from mprecipes.data.templates import PLAIN, ChatTemplate, Span
from mprecipes.data.tokens import BYTES, TextTokenizer
from mprecipes.errors import DataError
from mprecipes.identity.files import canonical_json

LOSS_ON = ("assistant", "last", "completion", "all")


@dataclass(frozen=True)
class Encoded:
    """One conversation.

    Attributes:
        ids: its tokens.
        targets: which of them are targets (bool, of the same length).
        num_unended: assistant turns whose targets do not end with a special token.
    """

    ids: np.ndarray
    targets: np.ndarray
    num_unended: int = 0


def find_template(tokenizer: TextTokenizer, name: str | None) -> str:
    """Gives a chat template's text: of a file, `plain`, or the tokenizer's own.

    Raises:
        DataError: there is none, or it writes today's date, so that a row has no fixed text.
    """
    if name is not None and name != "plain":
        try:
            return Path(name).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"no readable chat template: {error}",
                expected="a file with a Jinja chat template, or plain",
                where=f"template {name}",
                action="correct template in option chat",
            ) from error
    own = tokenizer.hf.chat_template
    if name == "plain" or (own is None and tokenizer.name == BYTES):
        return PLAIN
    if not isinstance(own, str):
        found = f"the templates {', '.join(own)}" if isinstance(own, dict) else "no chat template"
        raise DataError(
            f"{found} in the tokenizer",
            expected="one chat template, of the tokenizer or of a file",
            where=f"tokenizer {tokenizer.name}",
            action="chat: {template: FILE.jinja}, or chat: {template: plain}",
        )
    return own


class ChatEncoder:
    """Encodes conversations with one tokenizer and template; the same row always gives the same.

    Args:
        template: its text.
        loss_on: "assistant" for every assistant turn, "last" for the last one, "completion" for
            what follows the prompt of a row that has one, "all" for every token but the first.
        values: further names the template may use, such as `date_string`.

    Attributes:
        digest: SHA-256 of all that decides the result, the tokenizer included.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: str,
        *,
        loss_on: str = "assistant",
        values: Mapping[str, Any] | None = None,
    ) -> None:
        if "strftime_now" in template and "date_string" not in (values or {}):
            raise DataError(
                "a chat template that writes the date of the day it runs on",
                expected="a template that gives a row the same text on every day",
                where=f"chat template of {tokenizer.name}",
                action='chat: {template_values: {date_string: "26 Jul 2024"}}, or another template',
            )
        self.tokenizer, self._hf, self.loss_on = tokenizer, tokenizer.hf, loss_on
        if not self._hf.is_fast:
            raise DataError(
                "a tokenizer that does not say which characters a token stands for",
                expected="a fast tokenizer, of the library tokenizers",
                where=f"tokenizer {tokenizer.name}",
                action="convert it with AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            )
        special = {
            str(token): index
            for index, token in self._hf.added_tokens_decoder.items()
            if token.special
        }
        self._special_ids = special
        names = {**self._hf.special_tokens_map, **(values or {})}
        self.template = ChatTemplate(template, list(special), names)
        self._bos = self._hf.bos_token_id
        self._adds_bos = self._bos is not None and self._hf("a").input_ids[:1] == [self._bos]
        decides = [tokenizer.digest, template, sorted(special.items()), loss_on, dict(values or {})]
        self.digest = hashlib.sha256(canonical_json(decides)).hexdigest()

    def __call__(self, conversation: Conversation) -> Encoded:
        """Encodes one row.

        Raises:
            BadRow: its targets cannot be told exactly, or there are none.
        """
        if conversation.text is not None:
            return self._plain(*conversation.text)
        rendered = self.template(conversation)
        wanted = self._wanted(conversation, rendered.turns)
        ids, begins, ends = self._whole(rendered.neutral)
        if not rendered.is_clean:
            apart = self._apart(list(self.template._split(rendered.neutral)))
            if apart[0] != ids:
                found = "text that reads like a special token, which this tokenizer cannot keep"
                raise BadRow("special-token text", found, 0)
            ids, begins, ends = self._apart(rendered.pieces)
        targets = np.zeros(len(ids), dtype=bool)
        low, high = np.array(begins), np.array(ends)
        num_unended = 0
        for begin, end in wanted:
            within = (low < end) & (high > begin)
            targets |= within
            last = np.flatnonzero(within)[-1:]
            num_unended += not (last.size and ids[last[0]] in self._special_ids.values())
        if self.loss_on == "all":
            if any(each.get("weight") == 0 for each in conversation.messages):
                raise BadRow("no exact targets", "a message of weight 0, with loss_on all", 0)
            targets[:] = True
        return self._finished(ids, targets, num_unended)

    def _wanted(self, conversation: Conversation, turns: list[list[Span]]) -> list[Span]:
        roles = [message["role"] for message in conversation.messages]
        num_turns = roles.count("assistant")
        if self.loss_on == "last":
            keep = num_turns - 1
        elif self.loss_on == "completion":
            if conversation.num_prompt is None:
                found = "messages without a prompt and a completion"
                raise BadRow("no completion", f"{found}, with loss_on completion", 0)
            keep = roles[: conversation.num_prompt].count("assistant")
        else:
            keep = 0
        said = [each for each in conversation.messages if each["role"] == "assistant"]
        learned = [bool(each.get("weight", 1)) for each in said]
        if (keep or not all(learned)) and len(turns) != num_turns:
            found = f"{len(turns[0])} marked blocks for {num_turns} assistant turns"
            raise BadRow("no exact targets", f"{found}, with loss_on {self.loss_on}", 0)
        if len(turns) != num_turns:
            return turns[0]
        return [s for turn, is_learned in [*zip(turns, learned)][keep:] if is_learned for s in turn]

    def _plain(self, prompt: str, completion: str) -> Encoded:
        """Prompt and completion are encoded apart, as when a model continues the prompt."""
        first = [self._bos] if self._adds_bos else []
        asked, answered = (self._text(text)[0] for text in (prompt, completion))
        ids = first + asked + answered + [self.tokenizer.eos_id]
        targets = np.ones(len(ids), dtype=bool)
        if self.loss_on != "all":
            targets[: len(first) + len(asked)] = False
        return self._finished(ids, targets, 0)

    def _finished(self, ids: Sequence[int], targets: np.ndarray, num_unended: int) -> Encoded:
        if (
            self._bos is not None
            and list(ids[:2]) == [self._bos] * 2
            and self._bos != (self.tokenizer.eos_id)
        ):
            raise BadRow("two BOS", "a row that begins with two BOS tokens", 0)
        targets[:1] = False
        if not targets.any():
            raise BadRow("no targets", "a row without a token to be trained", 0)
        return Encoded(np.asarray(ids, self.tokenizer.dtype), targets, num_unended)

    def _whole(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """Gives ids and the characters each stands for, special tokens recognised."""
        return self._encode(text, split_special_tokens=False)

    def _text(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """Likewise of text in which nothing is a special token."""
        return self._encode(text, split_special_tokens=True)

    def _encode(
        self, text: str, *, split_special_tokens: bool
    ) -> tuple[list[int], list[int], list[int]]:
        found = self._hf(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            split_special_tokens=split_special_tokens,
            verbose=False,
        )
        begins, ends, at = [], [], 0
        for begin, end in found["offset_mapping"]:
            begins.append(min(begin, at))  # some tokenizers leave leading spaces out
            ends.append(end)
            at = max(at, end)
        return list(found["input_ids"]), begins, ends

    def _apart(self, pieces: Sequence[tuple[str, bool]]) -> tuple[list[int], list[int], list[int]]:
        """Likewise of pieces of which it is known what is a special token."""
        at = 0
        ids: list[int] = []
        begins: list[int] = []
        ends: list[int] = []
        for text, is_special in pieces:
            alone = [self._special_ids[text]] if is_special else []
            found = (alone, [0], [len(text)]) if is_special else self._text(text)
            ids += found[0]
            begins += [at + each for each in found[1]]
            ends += [at + each for each in found[2]]
            at += len(text)
        return ids, begins, ends
