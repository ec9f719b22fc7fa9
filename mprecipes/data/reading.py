# SPDX-License-Identifier: Apache-2.0
"""A recipe's one call for its data, and what its model must agree with them about."""

from collections.abc import Callable
from typing import Any, Protocol

from mprecipes.compute.ranks import Ranks
from mprecipes.data.packing import PreparedData, prepare_data
from mprecipes.errors import ConfigError


class DataOptions(Protocol):
    """The options of a recipe's config that `read_data` reads."""

    @property
    def dataset(self) -> str: ...
    @property
    def text_field(self) -> str: ...
    @property
    def on_bad_rows(self) -> str: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def train_tokenizer_vocab(self) -> int | None: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def eval_fraction(self) -> float | None: ...


def read_data(
    config: DataOptions, ranks: Ranks, *, should_stop: Callable[[], bool]
) -> PreparedData:
    """Collective: gives the training and held-out rows a config asks for; see `prepare_data`."""
    return prepare_data(
        source=config.dataset,
        text_field=config.text_field,
        on_bad_rows=config.on_bad_rows,
        tokenizer=config.tokenizer,
        train_tokenizer_vocab=config.train_tokenizer_vocab,
        seq_length=config.seq_length,
        eval_fraction=config.eval_fraction or None,
        ranks=ranks,
        should_stop=should_stop,
    )


def fit_to_data(model: Any, data: PreparedData) -> None:
    """Refuses a model that the data do not fit; else makes its configs know where a text ends.

    The end token of the data becomes one of `eos_token_id`, at which generation stops: a new model
    has a number there that its class brought along, with the tokenizer of another model in mind.
    Call it before anything is saved, since checkpoints hold the configs.

    Args:
        model: of transformers or peft, not yet prepared.

    Raises:
        ConfigError: there is no embedding for some token, or no position for some token of a row;
            both numbers are named.
    """
    config = model.config
    _refuse_misfit(config, data)
    default, ends = type(config)(), _as_list(config.eos_token_id)
    if not config.name_or_path:  # a new one
        ends = [] if ends == _as_list(default.eos_token_id) else ends
        config.bos_token_id = (
            None if config.bos_token_id == default.bos_token_id else config.bos_token_id
        )
    ends = ends if data.eos_id in ends else [*ends, data.eos_id]
    config.eos_token_id = ends[0] if len(ends) == 1 else ends
    if (generation := model.generation_config) is not None:
        generation.bos_token_id = config.bos_token_id
        generation.eos_token_id = config.eos_token_id


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _refuse_misfit(model_config: Any, data: PreparedData) -> None:
    seq_length = data.train.seq_length
    for option, found, needed, what in (
        ("vocab_size", model_config.vocab_size, data.vocab_size, "tokens of the tokenizer"),
        (
            "max_position_embeddings",
            getattr(model_config, "max_position_embeddings", seq_length),
            seq_length,
            "tokens of a row (seq_length)",
        ),
    ):
        if found < needed:
            raise ConfigError(
                f"{option} {found} of the model, {needed} {what}",
                expected=f"at least {needed}",
                where=f"model_config.{option}",
                action=f"set {option}: {needed} under model_config, or change the data options",
            )
