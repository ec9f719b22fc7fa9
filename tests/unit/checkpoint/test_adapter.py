# SPDX-License-Identifier: Apache-2.0
"""Adapters as folders: reloaded they give what was trained, and nothing half written stays."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from mprecipes import export_adapter, lora_options
from mprecipes.checkpoint.starting import load_causal_lm, model_facts
from mprecipes.errors import ConfigError, VerificationError
from mprecipes.tools.export import export_folder
from tests.exporting import save
from tests.kept import Folder

IDS = torch.arange(8)[None]

MODEL = {
    "vocab_size": 257, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def base():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MODEL))


@pytest.fixture
def saved(base, tmp_path):
    """A model with adapters that do something, and its checkpoint of step 3 by a real manager."""
    base.save_pretrained(tmp_path / "base")
    base.config.name_or_path = str(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(**lora_options({"r": 2}).to_peft()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    manifest = save(tmp_path / "run", model, step=3, facts=model_facts(model, None))
    return Folder(tmp_path / "run"), model.eval(), manifest


def logits_of(tmp_path, folder):
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    return PeftModel.from_pretrained(fresh, folder).eval()(IDS).logits


def config(base):
    made = {"model_type": "llama", **MODEL} if base is None else None
    return SimpleNamespace(model_name_or_path=base and str(base), model_config=made, tuning=None,
                           seed=0)  # fmt: skip


def test_adapter_and_merged_model_give_the_same_logits(saved, tmp_path):
    """The adapter on its base, and the merged folder, both give the trained model's logits."""
    run, model, _ = saved
    trained = model(IDS).logits
    (run.path / ".model.staging").mkdir()
    export_adapter(run, config(tmp_path / "base"), run.path / "tokenizer")
    assert torch.equal(logits_of(tmp_path, run.path / "adapter"), trained)
    merged = AutoModelForCausalLM.from_pretrained(run.path / "model", dtype=torch.float32).eval()
    assert (merged(IDS).logits - trained).abs().max() < 1e-5
    for folder in ("adapter", "model"):
        lineage = json.loads((run.path / folder / "mprecipes.json").read_text())
        assert (lineage["run_id"], lineage["step"]) == (run.run_id, 3)
        assert lineage["ancestry"] == [{"model": "base"}]
        assert (run.path / folder / "tokenizer.json").is_file()
        card = (run.path / folder / "README.md").read_text().splitlines()
        assert f"| run | {run.run_id} |" in card and "1. base" in card
    card = (run.path / "model" / "README.md").read_text()
    frozen = saved[2].raw["frozen"]
    told = f"{frozen['parameters']:,} parameters, digest {frozen['digest']} |"
    assert f"| merged into | {told}" in card
    assert f"| parameters | {frozen['parameters']:,} |" in card
    assert "library_name: transformers" in card
    assert sorted(path.name for path in run.path.iterdir() if path.name.startswith(".")) == []


def test_a_new_base_is_built_again(saved, tmp_path):
    """From its config and seed; the streams of random numbers are left as they are."""
    run, model, _ = saved
    before = torch.get_rng_state()
    export_adapter(run, config(None), run.path / "tokenizer")
    assert torch.equal(torch.get_rng_state(), before)
    merged = AutoModelForCausalLM.from_pretrained(run.path / "model", dtype=torch.float32).eval()
    assert (merged(IDS).logits - model(IDS).logits).abs().max() < 1e-5


def test_another_base_is_not_merged_into(saved, tmp_path):
    """One changed weight of the base: refused by digest, the adapter is there, the model is not."""
    run, _, manifest = saved
    changed = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        next(changed.parameters())[0, 0] += 1
    changed.save_pretrained(tmp_path / "changed")
    with pytest.raises(VerificationError) as caught:
        export_adapter(run, config(tmp_path / "changed"), run.path / "tokenizer")
    assert caught.value.found.startswith("a base with digest ")
    assert caught.value.expected.endswith(manifest.raw["frozen"]["digest"])
    assert caught.value.where.endswith("changed") and caught.value.action
    assert (run.path / "adapter").is_dir() and not (run.path / "model").exists()


def test_a_checkpoint_of_adapters_is_exported_by_itself(saved, tmp_path):
    """It holds what any other does, and becomes a folder for peft, in any dtype."""
    _, model, manifest = saved
    assert "pretrained.json" in {entry.path for entry in manifest.files}
    whole = export_folder(
        manifest.folder, tmp_path / "out", dtype="fp32", max_shard_size="2GB"
    )["files"]  # fmt: skip
    assert torch.equal(logits_of(tmp_path, tmp_path / "out"), model(IDS).logits)
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= {*whole}
    assert "config.json" not in whole and "model.safetensors" not in whole
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| architecture | adapters of a LlamaForCausalLM |" in card
    frozen = manifest.raw["frozen"]
    told = f"{frozen['parameters']:,} parameters, digest {frozen['digest']} |"
    assert f"| frozen base | {told}" in card
    assert "library_name: peft" in card
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "base"
    export_folder(manifest.folder, tmp_path / "small", dtype="bf16", max_shard_size="2GB")
    small = load_file(tmp_path / "small" / "adapter_model.safetensors")
    assert {each.dtype for each in small.values()} == {torch.bfloat16}


def test_no_run_starts_from_adapters_alone(saved):
    """Their base is not there; the merged folder is named."""
    with pytest.raises(ConfigError) as caught:
        load_causal_lm(str(saved[2].folder))
    assert caught.value.found == "a checkpoint of adapters, which holds no weights of their base"
    assert "all weights" in caught.value.expected
    assert caught.value.where == "model_name_or_path step-00000003"
    assert "model/" in caught.value.action
