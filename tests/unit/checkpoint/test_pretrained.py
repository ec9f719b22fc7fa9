# SPDX-License-Identifier: Apache-2.0
"""A checkpoint knows its model's config and tokenizer, without a path to any of them."""

import json

import pytest
import torch

from mprecipes.checkpoint.manifest import build_manifest, read_manifest, write_manifest, write_sums
from mprecipes.checkpoint.pretrained import describe_pretrained, read_pretrained, write_files
from mprecipes.checkpoint.storage import put_json
from mprecipes.errors import VerificationError
from tests.exporting import tiny
from tests.kept import RUN_ID


@pytest.fixture
def tokenizer_dir(tmp_path):
    folder = tmp_path / "tokenizer"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "tokenizer.json").write_text('{"a": "\u00e9"}', encoding="utf-8")
    (folder / "tokenizer.model").write_bytes(b"\xff\x00\x80")
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ x }}")
    return folder


def test_all_files_come_back_with_the_dtype_of_the_weights(tmp_path, tokenizer_dir):
    """Text, binary and nested ones byte for byte; the config says bfloat16 and the class."""
    value = describe_pretrained(torch.nn.parallel.DataParallel(tiny()), tokenizer_dir)
    assert json.loads(json.dumps(value)) == value
    assert (value["architecture"], value["ancestry"]) == ("LlamaForCausalLM", [])
    write_files(value, tmp_path / "out", torch.bfloat16)
    for path in tokenizer_dir.rglob("*.*"):
        copy = tmp_path / "out" / path.relative_to(tokenizer_dir)
        assert copy.read_bytes() == path.read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    assert config["hidden_size"] == 16 and (tmp_path / "out" / "generation_config.json").exists()


def test_a_model_of_another_library_has_none(tokenizer_dir):
    """A plain module is saved without, and cannot be exported."""
    assert describe_pretrained(torch.nn.Linear(2, 2), tokenizer_dir) is None


def test_what_a_model_began_from_is_named_without_its_place(tmp_path, tokenizer_dir):
    """A folder of somebody else's by its last name, a hub id as it is."""
    for given, named in (("/models/llama", "llama"), ("org/llama", "org/llama")):
        model = tiny()
        model.config._name_or_path = given
        value = describe_pretrained(model, tokenizer_dir)
        assert value["ancestry"] == [{"model": named}]
        assert "/models" not in json.dumps(value)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"texts": {"config.json": "{}", "../evil": "x"}}, "a file '../evil'"),
        ({"binaries": {"/etc/evil": "eA=="}}, "a file '/etc/evil'"),
        ({"schema": 2}, "schema 2"),
        ({"texts": {}}, "no config.json"),
        ({"ancestry": None}, "ancestry is of the wrong type or missing"),
    ],
)
def test_a_hostile_one_is_refused(tmp_path, tokenizer_dir, change, found):
    """A path that leaves the folder, another schema, or a part that is missing."""
    value = {**describe_pretrained(tiny(), tokenizer_dir), **change}
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    files = [put_json(value, folder, "pretrained.json", rank=0)]
    position = {"step": 1, "updates": 1, "samples_seen": 1, "tokens_seen": 1}
    manifest = build_manifest(
        run_id=RUN_ID, position=position, facts={}, files=files, params={}, shapes={},
        state_digests={},
    )  # fmt: skip
    write_sums(folder, files)
    write_manifest(folder, manifest)
    with pytest.raises(VerificationError) as caught:
        read_pretrained(read_manifest(folder))
    error = caught.value
    assert (error.found, error.where) == (found, "step-00000001/pretrained.json")
    assert "schema 1" in error.expected and "export another" in error.action
