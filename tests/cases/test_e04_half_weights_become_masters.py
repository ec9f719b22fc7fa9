# SPDX-License-Identifier: Apache-2.0
"""Cases E04, F01 and F02: weights stored in 16 bit were trained in 16 bit, or ended in an error.

Reports: pytorch/pytorch#74739, huggingface/transformers#23165, areal-project/AReaL#1292,
meta-pytorch/torchtune#2254, NVIDIA/apex#1728, huggingface/sentence-transformers#3773,
verl-project/verl#749.
"""

import hashlib
import typing

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mprecipes import CheckpointManager, Position, parse_config
from mprecipes.checkpoint.manifest import read_manifest
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import ConfigError
from tests.kept import Folder
from tests.sft import CHAT, LORA, MODEL, load


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def folder(request, tmp_path_factory):
    """A model folder stored in 16 bit."""
    path = tmp_path_factory.mktemp("half") / "model"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    model.to(request.param).save_pretrained(path)
    return path


@pytest.mark.parametrize("path", [CHAT, LORA], ids=["chat", "lora"])
def test_f02_every_precision_starts_from_the_same_masters(path, folder, tmp_path):
    """FP32 parameters, bit by bit the same in every mode the recipe offers; others are refused."""
    recipe, digests = load(path), set()
    modes = typing.get_args(typing.get_type_hints(recipe.Config)["precision"])
    words = ["--model_name_or_path", str(folder), "--output_dir", str(tmp_path)]
    for mode in ("fp32", "bf16", "fp16", "fp8"):
        if mode not in modes:
            with pytest.raises(ConfigError) as error:
                parse_config(recipe.Config, [*words, "--precision", mode])
            assert "precision" in error.value.where
            continue
        config, _ = parse_config(recipe.Config, [*words, "--precision", mode])
        torch.manual_seed(0)
        model = recipe.build_model(config)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        digests.add(hashlib.sha256(data).hexdigest())
    assert len(digests) == 1


def test_f01_a_small_update_is_not_rounded_away(folder, tmp_path):
    """Gradient 1 on a weight 1.0, rate 1e-4, 100 steps: 0.99; moments are FP32 on disk too."""
    recipe = load(CHAT)
    config = recipe.Config(
        output_dir=str(tmp_path), model_name_or_path=str(folder), learning_rate=1e-4
    )
    model = recipe.build_model(config)
    weight = model.model.norm.weight
    assert (weight == 1.0).all()
    optimizer = recipe.build_optimizer(model, config)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.detach().numpy() == pytest.approx(0.99, abs=1e-4)
    run = Folder(tmp_path / "run")
    with CheckpointManager(run, Ranks(), model, optimizer) as manager:
        manager.save(Position(100, 100, 100, 100), {}, {}, wait=True)
    manifest = read_manifest(run.checkpoints / "step-00000100")
    assert set(manifest.params.values()) == {"float32"}
    state = optimizer.state[weight]
    assert {state[key].dtype for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}
