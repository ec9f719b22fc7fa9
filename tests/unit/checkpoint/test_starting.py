# SPDX-License-Identifier: Apache-2.0
"""Where a model starts from: FP32 whatever was stored, with its ancestry, or refused."""

import hashlib
import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mprecipes import CheckpointManager, Position, load_causal_lm, model_facts, start_model
from mprecipes.checkpoint.snapshot import live_tensors
from mprecipes.compute.ranks import Ranks
from mprecipes.compute.tuning import TuningOptions
from mprecipes.data.tokens import load_tokenizer
from mprecipes.errors import ConfigError, VerificationError
from tests.kept import Folder, flip

MODEL = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))


def weights(made):
    """SHA-256 over all parameters, bit by bit."""
    data = b"".join(p.detach().numpy().tobytes() for p in made.state_dict().values())
    return hashlib.sha256(data).hexdigest()


def saved(model, tmp_path):
    """Gives the folder of a checkpoint of the model."""
    run = Folder(tmp_path / "run")
    load_tokenizer("bytes").save(tmp_path / "tokenizer")
    optimizer = torch.optim.AdamW(model.parameters())
    with CheckpointManager(
        run, Ranks(), model, optimizer, tokenizer_dir=tmp_path / "tokenizer"
    ) as manager:
        manager.save(Position(7, 7, 70, 700), {}, {}, wait=True)
    return run.checkpoints / "step-00000007"


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash attention is installed")
def test_an_attention_that_is_not_installed(model):
    """Refused with the option's name, for a new model too."""
    config = SimpleNamespace(model_name_or_path=None, model_config=MODEL)
    with pytest.raises(ConfigError) as error:
        start_model(config, TuningOptions(attn_implementation="flash_attention_2"))
    assert "FlashAttention2" in error.value.found
    assert "installed" in error.value.expected
    assert error.value.where == "attn_implementation flash_attention_2 in option tuning"
    assert "attn_implementation: sdpa" in error.value.action


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_f02_the_dtype_on_disk_does_not_decide(model, tmp_path, stored):
    """Cases F02 and E04: weights stored in 16 bit are loaded as FP32, and are the stored values."""
    model.to(stored).save_pretrained(tmp_path / "model")
    loaded = load_causal_lm(str(tmp_path / "model"))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert weights(loaded) == weights(model.float())


def test_a_milestone_gives_its_weights_and_ancestry(model, tmp_path):
    """From a checkpoint: the same bits, and run, step and digest for the manifest and the card."""
    folder = saved(model, tmp_path)
    loaded = load_causal_lm(str(folder), attn_implementation="eager")
    assert loaded.config._attn_implementation == "eager"
    assert weights(loaded) == weights(model)
    [own] = model_facts(loaded, str(folder))["started_from"]["ancestry"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (own["run_id"], own["step"]) == (manifest["run_id"], 7)
    assert own["root_sha256"] == manifest["root_sha256"]


def test_a_damaged_milestone_is_not_a_start(model, tmp_path):
    """One flipped bit in the weights is refused."""
    folder = saved(model, tmp_path)
    [file] = folder.glob("*.safetensors")
    flip(file)
    with pytest.raises(VerificationError) as error:
        load_causal_lm(str(folder))
    assert "sha256" in error.value.found


def test_no_such_model_is_refused(tmp_path):
    """Without a network, a name that is no path is refused with what may be written."""
    with pytest.raises(ConfigError) as error:
        load_causal_lm(str(tmp_path / "absent"))
    assert error.value.found.startswith("no model could be loaded")
    assert ".gguf" in error.value.expected
    assert "absent" in error.value.where
    assert "trust_remote_code" in error.value.action


def test_a_config_names_a_model_or_describes_one(model, tmp_path):
    """model_name_or_path is loaded; without it model_config is built; attention is the tuning's."""
    model.save_pretrained(tmp_path / "model")
    config = SimpleNamespace(model_name_or_path=str(tmp_path / "model"), model_config=None)
    assert weights(start_model(config)) == weights(model)
    config.model_name_or_path, config.model_config = None, MODEL
    made = start_model(config, TuningOptions(attn_implementation="eager"))
    assert made.config._attn_implementation == "eager"
    assert {p.dtype for p in made.parameters()} == {torch.float32}


def test_a_config_that_names_and_describes_a_model_is_refused(tmp_path):
    """The described one would be ignored, and be in the manifest all the same."""
    config = SimpleNamespace(model_name_or_path=str(tmp_path), model_config=MODEL)
    with pytest.raises(ConfigError) as error:
        start_model(config)
    assert error.value.found == f"model_name_or_path {tmp_path} and model_config"
    assert "one of the two" in error.value.expected
    assert error.value.where == "model_config"
    assert "--model_config none" in error.value.action


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda tensors: {f"module.{k}": v for k, v in tensors.items()}, "unknown: module.model."),
        (lambda tensors: {k: v for k, v in tensors.items() if "layers.0.mlp.up" not in k},
         "1 weights are not in its files: model.layers.0.mlp.up_proj.weight; unknown: none"),
        (lambda tensors: {k: v[:-1].clone() if "0.mlp.up" in k else v for k, v in tensors.items()},
         "model.layers.0.mlp.up_proj.weight"),
    ],
    ids=["other-names", "one-missing", "other-shape"],
)  # fmt: skip
def test_i03_a_weight_that_the_files_lack_is_refused(model, tmp_path, change, found):
    """transformers fills it with random numbers and goes on: the model would be another one."""
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as error:
        load_causal_lm(str(tmp_path))
    assert found in error.value.found
    assert "under its own name and in its own shape" in error.value.expected
    assert error.value.where == f"model_name_or_path {tmp_path}"
    assert "module. or _orig_mod." in error.value.action


def test_frozen_weights_are_known_by_their_digest(model):
    """With adapters only these are state; one changed bit of the base changes its digest."""
    before = weights(model)
    made = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad])
    live = live_tensors(made, optimizer)
    assert live.keys() == {f"weights/{n}" for n, p in made.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in live)
    facts = model_facts(made, None)["frozen"]
    assert facts["parameters"] == sum(p.numel() for p in made.parameters() if not p.requires_grad)
    assert model_facts(made, None)["frozen"] == facts
    frozen = next(p for p in made.parameters() if not p.requires_grad)
    frozen.data.view(torch.int32).view(-1)[0] ^= 1
    assert model_facts(made, None)["frozen"]["digest"] != facts["digest"]
    assert before != weights(model)


def test_a_model_that_trains_in_full_has_nothing_frozen(model):
    """No `frozen`, and `started_from` only where it began from something."""
    assert model_facts(model, None) == {}
    facts = model_facts(model, "some/model")
    assert facts.keys() == {"started_from"}
    assert facts["started_from"]["ancestry"] == [{"model": "some/model"}]
    assert len(facts["started_from"]["weights_digest"]) == 16
