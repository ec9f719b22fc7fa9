# SPDX-License-Identifier: Apache-2.0
"""The numbers of the SFT recipes do not change unless their major version says so."""

import json

import pytest

from mprecipes.identity.recipe import read_recipe
from tests.golden.regenerate import made_with
from tests.golden.sft_traces import CASES, record_sft, sft_trace_path
from tests.golden.test_golden_traces import differences


@pytest.mark.launch
@pytest.mark.parametrize("recipe", CASES, ids=lambda path: path.stem)
def test_the_sft_trace_is_the_golden_one(recipe, tmp_path):
    """Ten steps: bitwise on the recorded Python, torch and CPU, else within 1e-5."""
    path = sft_trace_path(recipe)
    assert path.exists(), f"{path.name} is missing: a new major version needs `make golden`"
    golden, found = json.loads(path.read_text()), record_sft(recipe, tmp_path)
    wrong = differences(golden, found, bitwise=golden["made_with"] == made_with())
    assert not wrong, (
        f"{recipe.name} {read_recipe(recipe).version} gives another trace; if that is meant, raise "
        "MAJOR, add a CHANGELOG entry and run `make golden`:\n" + "\n".join(wrong)
    )
