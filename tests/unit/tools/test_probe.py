# SPDX-License-Identifier: Apache-2.0
"""A mode that trains as FP32 does passes, and one that does not is named with its cause."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from mprecipes.compute.measuring import closeness
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.precision import MODES
from mprecipes.compute.ranks import Ranks
from mprecipes.data.reading import read_data
from mprecipes.errors import ConfigError
from mprecipes.tools import probe
from mprecipes.tools.probe import Prober, load_recipe, probe_recipe, size_warnings
from tests.fix64 import MODEL, RECIPE, write_rows
from tests.toy_model import tiny_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """A recipe's module, a config of FIX-64, and its rows."""
    rows = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")
    recipe = load_recipe(RECIPE)
    config = recipe.Config(
        output_dir="x", dataset=str(rows), seq_length=16, eval_fraction=None, model_config=MODEL,
        per_device_train_batch_size=4, max_steps=4, warmup_steps=1, learning_rate=1e-3,
    )  # fmt: skip
    return recipe, config, read_data(config, Ranks(), should_stop=lambda: False).train


@pytest.mark.parametrize(
    ("name", "found"),
    [("nope.py", "cannot be read"), (".", "cannot be read"), ("README.md", "not Python"),
     ("x.py", "no RECIPE")],
)  # fmt: skip
def test_a_file_that_is_no_recipe_is_refused(tmp_path, name, found):
    """A wrong path, a folder, a text or another program: named, and nothing of it is run."""
    (tmp_path / "README.md").write_text("# A title\n\nand a text\n")
    (tmp_path / "x.py").write_text("raise SystemExit('run')\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / name)
    assert found in caught.value.found
    assert caught.value.where.startswith(str(tmp_path / name))
    assert caught.value.expected.startswith("RECIPE = Recipe(") and caught.value.action


def test_every_mode_of_a_sound_model_passes(probed):
    """Gradients at the same weights and losses of four steps are those of FP32, within limits."""
    recipe, config, data = probed
    found = probe_recipe(recipe, config, data, ["bf16", "fp16", "fp8", "tf32"], steps=4,
                         policy=NumericsPolicy(), device=CPU)  # fmt: skip
    by_mode = {findings.mode: findings for findings in found}
    assert [f.passed for f in found] == [True, True, True, True, False]
    assert by_mode["tf32"].reason.startswith("not run: device cpu")
    cosines = {mode: f.worst[2] for mode, f in by_mode.items() if f.layers}
    assert cosines["fp16"] > cosines["bf16"] > cosines["fp8"] > 0.95
    assert len(by_mode["bf16"].layers) == 20 and len(by_mode["bf16"].losses) == 4
    assert by_mode["fp16"].skipped_steps == 0 and by_mode["fp8"].tokens_per_second > 0
    assert json.dumps([f.to_dict() for f in found])


def test_a_mode_that_fails_is_named_with_its_cause(probed):
    """Sabotage: an MLP whose 16-bit output is noise fails, and holding MLPs in FP32 helps."""
    recipe, config, data = probed
    build_model = recipe.build_model

    def broken(config):
        model = build_model(config)

        def noisy(module, inputs, output):
            return output if output.dtype == torch.float32 else -output

        model.get_submodule("model.layers.1.mlp").register_forward_hook(noisy)
        return model

    recipe.build_model = broken
    try:
        prober = Prober(recipe, config, data, steps=4, device=CPU)
        assert prober.reference().passed
        found = prober.probe(MODES["bf16"], NumericsPolicy())
    finally:
        recipe.build_model = build_model
    assert not found.passed and "cosine" in found.reason
    assert found.cause.startswith("MLP in FP32 helps: worst cosine")


@pytest.mark.parametrize(
    ("gradient", "reference", "error", "cosine"),
    [
        ([0.0, 0.0], [0.0, 0.0], 0.0, 1.0),
        ([0.0, 0.0], [3.0, 4.0], 1.0, 0.0),
        ([3.0, 4.0], [3.0, 4.0], 0.0, 1.0),
        ([4.0, 3.0], [3.0, 4.0], 2**0.5 / 5, 0.96),
        ([3e-12, 4e-12], [3e-12, 4e-12], 0.0, 1.0),
        ([-3.0, -4.0], [3.0, 4.0], 2.0, -1.0),
    ],
)
def test_gradients_are_compared_where_they_are_zero_or_small(gradient, reference, error, cosine):
    """Zeros in both are the same gradient, zeros in one are not; sizes do not change a cosine."""
    found = closeness(torch.tensor(gradient), torch.tensor(reference))
    assert found == pytest.approx((error, cosine), abs=1e-7)


def test_a_gradient_where_the_reference_has_none_has_no_cosine():
    """The error is large and can be written down as a number."""
    error, cosine = closeness(torch.ones(2), torch.zeros(2))
    assert cosine == 0.0 and 1e9 < error < float("inf")


def test_weights_whose_gradient_is_zero_in_every_mode_pass(probed):
    """As `lora_A` has while `lora_B` is zero: one factor of an MLP is 0, the others get nothing."""
    recipe, config, data = probed
    build_model = recipe.build_model

    def with_zeros(config):
        model = build_model(config)
        torch.nn.init.zeros_(model.get_submodule("model.layers.1.mlp.down_proj").weight)
        return model

    recipe.build_model = with_zeros
    try:
        prober = Prober(recipe, config, data, steps=1, device=CPU)
        prober.reference()
        found = prober.probe(MODES["bf16"], NumericsPolicy())
    finally:
        recipe.build_model = build_model
    assert found.layers["model.layers.1.mlp.gate_proj.weight"] == [0.0, 1.0]
    assert found.passed and found.worst[2] > 0.99


def test_throughput_is_of_targets_and_of_the_steps_alone(probed, monkeypatch):
    """Each loss takes a second: 4 of FP32's 7 are of steps, 3 of gradients that are kept.

    Of the 15 targets of a row the first 7 do not enter the loss: 4 steps of 4 rows have 128.
    """
    recipe, config, data = probed
    seconds = [0.0]
    compute_loss = recipe.compute_loss

    def slow(model, batch):
        seconds[0] += 1
        return compute_loss(model, batch)

    def masked(index):
        labels = data[index]["labels"].clone()
        labels[:8] = -100
        return {**data[index], "labels": labels}

    monkeypatch.setattr(recipe, "compute_loss", slow)
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    rows = [masked(index) for index in range(len(data))]
    prober = Prober(recipe, config, rows, steps=4, device=CPU)
    assert prober.reference().tokens_per_second == 128 / 4
    assert seconds == [7.0]
    assert prober.probe(MODES["bf16"], NumericsPolicy()).tokens_per_second == 128 / 4


def test_sizes_that_miss_a_multiple_are_warned_of():
    """257 words miss 8 and 16, heads of 8 miss 16 alone; 32 and 64 are fine."""
    lines = size_warnings(tiny_llama().config)
    assert [line.partition(":")[0] for line in lines] == ["vocab_size 257", "head_dim 8"]
    assert "pad_vocab_to_multiple_of: 16" in lines[0]
    gpt2 = AutoConfig.for_model("gpt2", n_embd=40, n_head=4, vocab_size=256)
    assert [line.split()[:2] for line in size_warnings(gpt2)] == [
        ["hidden_size", "40:"], ["head_dim", "10:"],
    ]  # fmt: skip
    assert "no multiple of 8" in lines[0] and "multiple of 8:" not in lines[1]
