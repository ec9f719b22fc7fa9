# SPDX-License-Identifier: Apache-2.0
"""SFT from a milestone of a pretraining run: it knows where it comes from, and goes on from it."""

import json

import pytest

from tests import fix64
from tests.launching import launch
from tests.reading import manifest
from tests.sft import CHAT, MODEL, options, write_chats

pytestmark = pytest.mark.launch


def test_a_pretraining_milestone_is_named_in_manifest_and_card(tmp_path):
    """Run id, step and digest of the milestone are in the SFT's manifest and model card; tied."""
    run = tmp_path / "pretrained"
    words = fix64.options(
        fix64.write_rows(tmp_path / "rows.jsonl"), run, max_steps=2, model_config=json.dumps(MODEL)
    )
    done = launch(fix64.RECIPE, words)
    assert done.returncode == 0, done.output
    milestone = run / "milestones" / "pretrain-end"
    words = options(
        write_chats(tmp_path / "chats.jsonl"), tmp_path / "sft", model_config=None,
        model_name_or_path=milestone, max_steps=2,
    )  # fmt: skip
    done = launch(CHAT, words)
    assert done.returncode == 0, done.output
    began = json.loads((milestone / "manifest.json").read_text())
    facts = manifest(tmp_path / "sft", 2)
    [own] = facts["started_from"]["ancestry"]
    assert (own["run_id"], own["step"], own["milestone"]) == (began["run_id"], 2, "pretrain-end")
    assert own["root_sha256"] == began["root_sha256"]
    assert facts["started_from"]["weights_digest"] == began["state_digests"]["weights"]
    assert "lm_head.weight" not in facts["params"]
    assert facts["params"].keys() == began["params"].keys()
    card = (tmp_path / "sft" / "model" / "README.md").read_text()
    assert began["run_id"] in card
    assert began["root_sha256"] in card
