# SPDX-License-Identifier: Apache-2.0
"""A recipe's one call for its conversations, and which tokenizer belongs to a model."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mprecipes import read_chats
from mprecipes.compute.ranks import Ranks
from mprecipes.data.chats import tokenizer_of
from mprecipes.errors import ConfigError
from mprecipes.identity.files import sha256_file
from tests.chats import write_jsonl


def test_the_options_of_a_config(tmp_path, monkeypatch):
    """dataset, chat, tokenizer, seq_length and eval_fraction decide; 0 held out is none."""
    monkeypatch.setenv("MPRECIPES_CACHE", str(tmp_path / "cache"))
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "2+2=", "completion": "4"}] * 3)
    config = SimpleNamespace(
        dataset=str(source), chat={"batching": "plain"}, tokenizer=None, model_name_or_path=None,
        tuning=None, seq_length=32, eval_fraction=0.0,
    )  # fmt: skip
    data = read_chats(config, Ranks(), should_stop=lambda: False)
    assert data.heldout is None
    assert data.train[0]["input_ids"].tolist() == [*b"2+2=4", 256]
    assert (data.vocab_size, data.eos_id, data.facts["tokenizer"]) == (257, 256, "bytes")


def test_the_tokenizer_that_belongs_to_a_model(tmp_path, monkeypatch):
    """The model's own; of a milestone the exported one, the named one, or none to be found."""
    monkeypatch.setenv("MPRECIPES_CACHE", str(tmp_path / "cache"))
    assert tokenizer_of(None) == "bytes"
    assert tokenizer_of("some/model") == "some/model"
    milestone = tmp_path / "run" / "milestones" / "end"
    milestone.mkdir(parents=True)
    manifest = milestone / "manifest.json"
    manifest.write_text(json.dumps({"data": {"tokenizer": "bytes"}}))
    assert tokenizer_of(str(milestone)) == "bytes"
    kept = {"texts": {"tokenizer_config.json": "{}"}, "binaries": {"extra.model": "AQI="}}
    (milestone / "pretrained.json").write_text(json.dumps(kept))
    digest = sha256_file(milestone / "pretrained.json")
    files = [{"path": "pretrained.json", "sha256": digest}]
    manifest.write_text(json.dumps({"data": {"tokenizer": "trained-300"}, "files": files}))
    written = Path(tokenizer_of(str(milestone)))
    assert (written / "tokenizer_config.json").read_text() == "{}"
    assert (written / "extra.model").read_bytes() == b"\x01\x02"
    (milestone / "pretrained.json").write_text("{}")
    with pytest.raises(ConfigError) as error:
        tokenizer_of(str(milestone))
    assert error.value.found.startswith("pretrained.json with SHA-256 ")
    assert error.value.expected == f"SHA-256 {digest}, as its manifest says"
    assert str(milestone) in error.value.where
    assert "--tokenizer" in error.value.action
