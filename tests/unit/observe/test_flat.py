# SPDX-License-Identifier: Apache-2.0
"""What a tracker groups runs by."""

from mprecipes import flat_config
from mprecipes.observe.flat import flatten

FACTS = {
    "recipe": {
        "name": "pretrain", "version": "1.2.0", "based_on": None, "sha256": "ab", "status": "own",
    },
    "precision": {"mode": "bf16", "compute": "bfloat16"},
    "topology": {"world_size": 2, "engine": "MULTI_CPU"},
    "data": {"fingerprint": "f00", "tokens": 5},
    "environment": {"git_commit": "c0ffee", "torch": "2.13"},
    "config": {"precision": "auto", "learning_rate": 0.1, "accept": [], "model": {"layers": 2}},
}  # fmt: skip


def test_the_measured_precision_stands_under_the_options_name():
    """`precision` is the mode that ran, not `auto`; recipe, data and commit stand beside it."""
    assert flat_config(FACTS) == {
        "precision": "bf16",
        "learning_rate": 0.1,
        "accept": "[]",
        "model.layers": 2,
        "recipe": "pretrain",
        "version": "1.2.0",
        "based_on": None,
        "recipe_sha256": "ab",
        "topology.world_size": 2,
        "topology.engine": "MULTI_CPU",
        "data_fingerprint": "f00",
        "git_commit": "c0ffee",
    }


def test_nested_values_get_dotted_names_and_lists_become_text():
    """Scalars stay what they are."""
    assert flatten({"a": {"b": {"c": True}}, "d": [1, "x"], "e": None}) == {
        "a.b.c": True,
        "d": '[1, "x"]',
        "e": None,
    }
