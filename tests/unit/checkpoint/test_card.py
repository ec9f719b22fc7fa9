# SPDX-License-Identifier: Apache-2.0
"""The model card says where weights come from, and says so where it does not know."""

import json

import yaml

from mprecipes.checkpoint.card import lineage_of, model_card
from tests.kept import Folder

PRETRAINED = {"architecture": "LlamaForCausalLM", "ancestry": []}


def test_what_is_not_known_is_called_so(tmp_path):
    """Of a checkpoint without facts: no recipe, no data, nothing measured, from random numbers."""
    manifest = Folder(tmp_path).save(3)
    card = model_card(manifest, PRETRAINED, "fp32")
    for line in (
        "| recipe | not recorded |", "| data fingerprint | not recorded |", "| parameters | 6 |",
        "| weights | fp32, the masters |", "| step | 3 |", "| milestone | none |",
        f"| checkpoint, SHA-256 | {manifest.root_sha256} |",
    ):  # fmt: skip
        assert line in card.splitlines()
    assert "Nothing." in card and "These weights began from random numbers." in card


def test_the_head_is_what_the_hub_reads(tmp_path):
    """The front matter is YAML with library and tag."""
    card = model_card(Folder(tmp_path).save(3), PRETRAINED, "bf16")
    head = yaml.safe_load(card.split("---")[1])
    assert head == {"library_name": "transformers", "tags": ["mprecipes"]}
    assert "| weights | bf16, from FP32 masters |" in card


def test_the_chain_of_ancestors_is_numbered(tmp_path):
    """The nearest first: a run with its digest, then a model of the hub; handed on as JSON."""
    ancestors = [
        {"run_id": "feed", "step": 9, "root_sha256": "d" * 64, "dtype": "fp32",
         "recipe": {"name": "pretrain", "version": "2.0.0"}},
        {"model": "org/base"},
    ]  # fmt: skip
    manifest = Folder(tmp_path).save(3, milestone="end")
    pretrained = {**PRETRAINED, "ancestry": ancestors}
    card = model_card(manifest, pretrained, "fp32")
    assert f"1. pretrain@2.0.0, run feed, step 9, checkpoint {'d' * 64}, as fp32" in card
    assert "2. org/base" in card
    lineage = lineage_of(manifest, pretrained, "fp32")
    assert json.loads(json.dumps(lineage)) == lineage
    assert (lineage["ancestry"], lineage["milestone"]) == (ancestors, "end")
