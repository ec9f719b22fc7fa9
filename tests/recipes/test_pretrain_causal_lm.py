# SPDX-License-Identifier: Apache-2.0
"""The functions a copy of the recipe starts from: learning rate, loss, masters."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain_causal_lm.py"
TINY = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("pretrain_causal_lm", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def config(recipe, tmp_path):
    return recipe.Config(output_dir=str(tmp_path), model_config=TINY)


def rates(recipe, config, **options):
    changed = dataclasses.replace(config, **options)
    return [recipe.learning_rate(changed, updates) for updates in range(changed.max_steps)]


def test_linear_schedule_b01(recipe, config):
    """Case B01: base 1.0, warm-up 2, total 10 gives the published list."""
    found = rates(
        recipe, config, learning_rate=1.0, lr_scheduler_type="linear", warmup_steps=2, max_steps=10
    )
    assert found == [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]


def test_cosine_schedule_b03_b04(recipe, config):
    """Cases B03 and B04: 20 steps, warm-up 4, peak 1e-3; the rate of step 11 is 6.913417e-04."""
    found = rates(recipe, config, learning_rate=1e-3, warmup_steps=4, max_steps=20)
    assert found[10] == pytest.approx(6.913417e-04, rel=1e-6)
    assert (found[0], found[2], found[4]) == (0.0, 5e-4, 1e-3)


def test_warmup_stable_decay(recipe, config):
    """The rate is flat for 80 % of the steps after the warm-up, then a straight line to zero."""
    found = rates(
        recipe,
        config,
        learning_rate=1.0,
        lr_scheduler_type="warmup_stable_decay",
        warmup_steps=0,
        max_steps=10,
    )
    assert found == pytest.approx([1.0] * 9 + [0.5])


def test_loss_is_the_fp32_cross_entropy_of_bf16_logits_f06(recipe):
    """Case F06: BF16 logits are up-cast first; the sum is the FP32 cross entropy of them."""

    class Fixed(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            logits = torch.randn(*input_ids.shape, 64, generator=torch.Generator().manual_seed(3))
            return type("Output", (), {"logits": logits.bfloat16()})

    ids = torch.arange(32).reshape(2, 16)
    loss = recipe.compute_loss(Fixed(), {"input_ids": ids, "labels": ids})
    logits = Fixed()(ids, False).logits[:, :-1].float()
    expected = F.cross_entropy(logits.reshape(-1, 64), ids[:, 1:].reshape(-1), reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss.item() != loss.bfloat16().item()


def test_token_exact_accumulation_f04(recipe, config):
    """Case F04: micro-batches of 4 and 60 targets give the gradient of one padded batch."""
    torch.manual_seed(0)
    model = recipe.build_model(config)
    short, long = torch.randint(0, 64, (4, 2)), torch.randint(0, 64, (4, 16))
    padded = torch.zeros(8, 16, dtype=torch.long)
    labels = torch.full((8, 16), -100)
    padded[:4, :2], labels[:4, :2] = short, short
    padded[4:], labels[4:] = long, long
    recipe.compute_loss(model, {"input_ids": padded, "labels": labels}).div(64).backward()
    whole = torch.cat([p.grad.flatten().clone() for p in model.parameters()])
    model.zero_grad()
    for ids, targets in ((short, 4), (long, 60)):
        loss_sum = recipe.compute_loss(model, {"input_ids": ids, "labels": ids})
        assert (ids.shape[0] * (ids.shape[1] - 1)) == targets
        (
            loss_sum * 2 / 64 / 2
        ).backward()  # as the recipe: x accumulation, which accelerate divides by
    parts = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert ((parts - whole).norm() / whole.norm()).item() < 1e-6


@pytest.mark.parametrize("rate", [1e-3, 1e-4, 1e-5])
def test_fp32_masters_take_small_updates_f01(recipe, config, rate):
    """Case F01: a weight of 1.0 under gradient 1 moves by 100 x the rate; in BF16 not at all."""
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    optimizer = recipe.build_optimizer(
        module, dataclasses.replace(config, learning_rate=rate, weight_decay=0.0)
    )
    for _ in range(100):
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()
    assert module.weight.item() == pytest.approx(1.0 - 100 * rate, abs=1e-5)
    state = optimizer.state[module.weight]
    assert (module.weight.dtype, state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (
        torch.float32,
    ) * 3


def test_a_bf16_model_on_disk_is_cast_up_f01(recipe, config, tmp_path):
    """Case F01: continued pretraining from a BF16 folder trains FP32 masters."""
    recipe.build_model(config).bfloat16().save_pretrained(tmp_path / "bf16")
    model = recipe.build_model(
        dataclasses.replace(config, model_name_or_path=str(tmp_path / "bf16"), model_config=None)
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_thousand_micro_batches_accumulate_in_fp32_f05(config, fresh_accelerator):
    """Case F05: 1024 gradients of 1.0 average to 1.0 under BF16; BF16 sums stop at 256."""
    from mprecipes.compute.launch import start

    module = torch.nn.Linear(1, 1, bias=False)
    options = dataclasses.replace(
        config, precision="bf16", per_device_train_batch_size=1, gradient_accumulation_steps=1024
    )
    with start(options, {"precision": "test"}) as launch:
        model = launch.accelerator.prepare(module)
        for _ in range(1024):
            with launch.accelerator.accumulate(model):
                launch.accelerator.backward(model(torch.ones(1, 1)).float().sum())
    gradient = module.weight.grad
    assert gradient.dtype == torch.float32 and gradient.item() == pytest.approx(1.0, abs=1e-5)


def test_groups_decay_matrices_only(recipe, config):
    """Norm weights and biases are not decayed; every parameter is in exactly one group."""
    model = recipe.build_model(config)
    optimizer = recipe.build_optimizer(model, config)
    decayed, plain = optimizer.param_groups
    assert all(p.dim() >= 2 for p in decayed["params"]) and decayed["weight_decay"] == 0.1
    assert all(p.dim() == 1 for p in plain["params"]) and plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))
