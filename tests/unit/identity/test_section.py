# SPDX-License-Identifier: Apache-2.0
"""A mapping option read into its dataclass."""

import dataclasses

import pytest

from mprecipes.errors import ConfigError
from mprecipes.identity.section import read_section


@dataclasses.dataclass(frozen=True)
class Garden:
    trees: int = 3
    kind: str = "apple"
    beds: tuple[int, ...] = ()
    paths: tuple[str, ...] | None = None


def test_what_is_left_out_has_its_default():
    """None and {} are all defaults; a value replaces one."""
    assert read_section(Garden, None, "garden") == Garden(3, "apple")
    assert read_section(Garden, {"trees": 5}, "garden") == Garden(5, "apple")


def test_a_list_becomes_a_tuple():
    """Of a field that is one; null stays null where it is allowed."""
    found = read_section(Garden, {"beds": [2, 1], "paths": None}, "garden")
    assert (found.beds, found.paths) == ((2, 1), None)
    assert read_section(Garden, {"paths": ["a"]}, "garden").paths == ("a",)


def test_a_field_that_is_an_option_of_its_own():
    """It has the value of that option, and the mapping may not set it, nor is it offered there."""
    assert read_section(Garden, {"kind": "pear"}, "garden", trees=7) == Garden(7, "pear")
    with pytest.raises(ConfigError) as caught:
        read_section(Garden, {"trees": 5}, "garden", trees=7)
    assert caught.value.found == "trees is set in garden"
    assert (caught.value.expected, caught.value.where) == ("the option trees", "option trees")
    assert caught.value.action == "write trees as an option of its own (--trees)"
    with pytest.raises(ConfigError) as caught:
        read_section(Garden, {"zzzzzz": 5}, "garden", trees=7)
    assert caught.value.expected == "one of kind, beds, paths"


@pytest.mark.parametrize(
    ("values", "found", "expected", "where"),
    [
        ({"treess": 5}, "unknown name treess", "trees", "option garden"),
        ({"zzzzzz": 5}, "unknown name zzzzzz", "one of trees, kind, beds, paths", "option garden"),
        ({"kind": 5}, "kind is 5", "text", "kind in option garden"),
        ({"beds": 5}, "beds is 5", "a list, each a whole number", "beds in option garden"),
        ({"beds": None}, "beds is none", "a list, each a whole number", "beds in option garden"),
        ({"paths": "a"}, "paths is 'a'", "a list, each text or none", "paths in option garden"),
    ],
)
def test_a_bad_name_or_value_is_refused(values, found, expected, where):
    """The name, the nearest one, the place and what to do are told."""
    with pytest.raises(ConfigError) as caught:
        read_section(Garden, values, "garden")
    assert found in caught.value.found
    assert expected in caught.value.expected
    assert (caught.value.where, bool(caught.value.action)) == (where, True)
