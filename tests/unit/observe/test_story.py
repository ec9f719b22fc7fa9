# SPDX-License-Identifier: Apache-2.0
"""A story is plain values that nobody changes on the way to the page."""

import dataclasses

import pytest

from tests.stories import story


def test_a_story_does_not_change():
    """Who draws it cannot rewrite it."""
    made = story()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.title = "another"
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.runs[0].label = "another"
