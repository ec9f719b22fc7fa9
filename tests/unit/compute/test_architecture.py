# SPDX-License-Identifier: Apache-2.0
"""No field of a model's config is ignored."""

import pytest

from mprecipes import new_model_config
from mprecipes.errors import ConfigError

FIELDS = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}


def test_fields_reach_the_config():
    """Two fields are set, the others keep the defaults of the type."""
    config = new_model_config(FIELDS)
    assert (config.model_type, config.hidden_size, config.num_attention_heads) == ("llama", 32, 4)
    assert config.attention_dropout == 0.0


@pytest.mark.parametrize(
    ("fields", "found", "expected"),
    [
        (None, "no model_config and no model_name_or_path", "one of the two"),
        ({**FIELDS, "model_type": "lama"}, "model_type 'lama'", "the nearest is 'llama'"),
        ({"hidden_size": 32}, "no model_type", "a model_type of transformers"),
        ({**FIELDS, "hiden_size": 3}, "'hiden_size' is no field", "the nearest is 'hidden_size'"),
        ({**FIELDS, "hidden_size": "wide"}, "wide", "values that LlamaConfig accepts"),
    ],
)
def test_what_would_be_ignored_or_fail_later_is_refused(fields, found, expected):
    """A missing or unknown type, a misspelt field and a wrong value are named with what fits."""
    with pytest.raises(ConfigError) as caught:
        new_model_config(fields)
    error = caught.value
    assert found in error.found and expected in error.expected
    assert error.where.startswith("model_config") and error.action
