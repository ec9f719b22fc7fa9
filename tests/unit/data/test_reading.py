# SPDX-License-Identifier: Apache-2.0
"""A recipe's data by the names of its options, and a model that must fit it."""

import json
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from mprecipes import fit_to_data, read_data
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import ConfigError


@pytest.fixture
def options(tmp_path):
    """Ten rows of eight byte tokens."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": f"row {i:03d}"}) + "\n" for i in range(10)))
    return SimpleNamespace(
        dataset=str(path),
        text_field="body",
        on_bad_rows="refuse",
        tokenizer="bytes",
        train_tokenizer_vocab=None,
        seq_length=8,
        eval_fraction=0.2,
    )


def test_options_reach_the_preparation(options):
    """Ten documents of eight tokens, the last fifth held out: 8 rows to train, 2 to evaluate."""
    data = read_data(options, Ranks(), should_stop=lambda: False)
    assert (len(data.train), len(data.heldout), data.vocab_size) == (8, 2, 257)
    assert bytes(data.train[3]["input_ids"][:7].tolist()) == b"row 003"


def test_a_fraction_of_zero_holds_nothing_out(options):
    """`--eval_fraction 0` is the same as none."""
    options.eval_fraction = 0.0
    data = read_data(options, Ranks(), should_stop=lambda: False)
    assert (len(data.train), data.heldout) == (10, None)


@pytest.mark.parametrize(
    ("config", "option", "needed"),
    [
        (SimpleNamespace(vocab_size=256, max_position_embeddings=8), "vocab_size", 257),
        (SimpleNamespace(vocab_size=257, max_position_embeddings=7), "max_position_embeddings", 8),
    ],
)
def test_a_model_that_is_too_small_is_refused(options, config, option, needed):
    """One embedding or one position too few is named with the number that is needed."""
    data = read_data(options, Ranks(), should_stop=lambda: False)
    with pytest.raises(ConfigError) as caught:
        fit_to_data(SimpleNamespace(config=config), data)
    error = caught.value
    assert f"{option} {needed - 1} of the model" in error.found
    assert error.expected == f"at least {needed}"
    assert error.where == f"model_config.{option}"
    assert f"set {option}: {needed}" in error.action


def new_model(**fields):
    config = AutoConfig.for_model("mamba", vocab_size=300, hidden_size=8, num_hidden_layers=1)
    for name, value in fields.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config)


def test_a_model_without_a_position_limit_fits(options):
    """Rotary or recurrent models without `max_position_embeddings` take rows of any length."""
    data = read_data(options, Ranks(), should_stop=lambda: False)
    fit_to_data(new_model(), data)


@pytest.mark.parametrize(
    ("fields", "ends", "begins"),
    [
        ({}, 256, None),
        ({"eos_token_id": 256, "bos_token_id": 7}, 256, 7),
        ({"eos_token_id": 5}, [5, 256], None),
        ({"name_or_path": "org/chat", "eos_token_id": 0, "bos_token_id": 0}, [0, 256], 0),
        ({"name_or_path": "org/chat", "eos_token_id": [3, 256]}, [3, 256], 0),
    ],
    ids=["new", "said", "said-another", "loaded", "loaded-knows"],
)
def test_a_model_stops_at_the_end_token_it_is_trained_with(options, fields, ends, begins):
    """A new Llama brought 2 along: what was exported never stopped at the tokenizer's end token."""
    model = new_model(**fields)
    fit_to_data(model, read_data(options, Ranks(), should_stop=lambda: False))
    for part in (model.config, model.generation_config):
        assert (part.eos_token_id, part.bos_token_id) == (ends, begins)
