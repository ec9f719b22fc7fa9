# SPDX-License-Identifier: Apache-2.0
"""How conversations become rows: the option `chat`, checked before anything starts.

In a config file:

    dataset: conversations.jsonl
    chat: {loss_on: last, truncation: truncate_left, batching: packed}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mprecipes.data.chat import LOSS_ON
from mprecipes.data.conversations import FORMATS
from mprecipes.data.fitting import TRUNCATION
from mprecipes.errors import ConfigError
from mprecipes.identity.section import read_section

_CHOICES = {
    "format": FORMATS,
    "loss_on": LOSS_ON,
    "truncation": TRUNCATION,
    "batching": ("packed", "grouped", "plain"),
    "padding_side": ("right", "left"),
    "on_bad_rows": ("refuse", "skip"),
}


@dataclass(frozen=True)
class ChatOptions:
    """How conversations become rows.

    Attributes:
        format: of the rows; "auto" tells it by their keys.
        template: a file with a chat template, or "plain"; None is the tokenizer's own.
        template_values: further names the template may use.
        loss_on: what is learned: every "assistant" turn, the "last" one, the "completion" of rows
            that have a prompt, or "all".
        truncation: of conversations longer than a row: "drop", "truncate_left" (the end is kept),
            "truncate_right", or "split" into several.
        batching: "packed" puts several conversations into a row, "grouped" one, and rows of like
            length into a batch, "plain" one.
        padding_side: where a row is filled up.
        on_bad_rows: "refuse" or "skip".
        mixture: further sources and all weights: {docstrings: 0.3, rows.jsonl: 0.7} in place of
            `dataset`.
    """

    format: str = "auto"
    template: str | None = None
    template_values: dict[str, Any] | None = None
    loss_on: str = "assistant"
    truncation: str = "drop"
    batching: Literal["packed", "grouped", "plain"] = "packed"
    padding_side: Literal["right", "left"] = "right"
    on_bad_rows: Literal["refuse", "skip"] = "refuse"
    mixture: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _refused(
                    name, repr(getattr(self, name)), f"one of {', '.join(choices)}", "write one"
                )
        for source, weight in (self.mixture or {}).items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not 0 < weight < float("inf"):
                raise _refused(
                    "mixture", f"{weight!r} for {source}", "weights above 0", "correct it"
                )

    def weights(self, dataset: str) -> dict[str, float]:
        """Gives the share of each source in an epoch's rows; they add up to 1."""
        weights = self.mixture or {dataset: 1.0}
        total = sum(weights.values())
        return {source: weight / total for source, weight in weights.items()}


def chat_options(values: Mapping[str, Any] | None) -> ChatOptions:
    """Gives the options of a mapping as it stands under `chat`.

    Raises:
        ConfigError: an unknown name, or a value that is not what its name takes.
    """
    return read_section(ChatOptions, values, "chat")


def _refused(name: str, found: str, expected: str, action: str) -> ConfigError:
    return ConfigError(
        f"{name} is {found}", expected=expected, where=f"{name} in option chat", action=action
    )
