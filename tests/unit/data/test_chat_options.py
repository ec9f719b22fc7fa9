# SPDX-License-Identifier: Apache-2.0
"""The option chat: strict, with its defaults."""

import pytest

from mprecipes.data.chat_options import ChatOptions, chat_options
from mprecipes.errors import ConfigError


def test_defaults_and_values():
    """Nothing given is the defaults; what is given replaces them."""
    assert chat_options(None) == ChatOptions()
    found = chat_options({"loss_on": "last", "batching": "grouped", "truncation": "split"})
    assert (found.loss_on, found.batching, found.truncation) == ("last", "grouped", "split")


@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ({"loss_on": "user"}, "loss_on", "assistant, last, completion, all"),
        ({"batching": "bfd"}, "batching", "packed, grouped, plain"),
        ({"padding_side": 3}, "padding_side", "right"),
        ({"template": 3}, "template", "text"),
        ({"mixture": {"a": 0.0}}, "mixture", "above 0"),
        ({"mixture": {"a": True}}, "mixture", "above 0"),
    ],
)
def test_wrong_values_are_refused(values, name, expected):
    """The name, what was found and what its values are."""
    with pytest.raises(ConfigError) as error:
        chat_options(values)
    assert error.value.found.startswith(f"{name} is ")
    assert expected in error.value.expected
    assert error.value.where == f"{name} in option chat"
    assert error.value.action


def test_unknown_names_are_refused():
    """The nearest name is given."""
    with pytest.raises(ConfigError) as error:
        chat_options({"los_on": "last"})
    assert error.value.found == "unknown name los_on"
    assert "loss_on" in error.value.expected
    assert error.value.where == "option chat"
    assert "loss_on" in error.value.action


def test_weights_add_up():
    """One source has all the rows; a mixture is scaled to 1."""
    assert ChatOptions().weights("a") == {"a": 1.0}
    assert ChatOptions(mixture={"a": 1, "b": 3}).weights("x") == {"a": 0.25, "b": 0.75}
