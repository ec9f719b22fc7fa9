# SPDX-License-Identifier: Apache-2.0
"""Case E01: with the fused optimizer an overflow was skipped and reported as done.

Report: huggingface/accelerate#4242.
"""

import json

import pytest
import torch

from tests.fix64 import MODEL, options
from tests.inprocess import load_recipe, train, with_gradient
from tests.reading import journal, tensors

STEPS, BAD = 6, 3
PLAIN = json.dumps({**MODEL, "attention_dropout": 0.0})


def words(data, run):
    return options(data, run, precision="fp16", max_steps=STEPS, save_steps=STEPS,
                   model_config=PLAIN)  # fmt: skip


def without_fused(recipe):
    build = recipe.build_optimizer

    def unfused(model, config):
        groups = build(model, config).param_groups
        keep = ("params", "weight_decay")
        return torch.optim.AdamW([{k: g[k] for k in keep} for g in groups], lr=config.learning_rate,
                                 betas=(0.9, 0.95), eps=1e-8, fused=False)  # fmt: skip

    recipe.build_optimizer = unfused


@pytest.fixture(scope="module", params=["fused", "unfused"])
def overflowed(request, tmp_path_factory, fix64):
    """A run whose third step overflows, and the batches its model was given."""
    run, batches = tmp_path_factory.mktemp("e01") / "run", []

    def change(recipe):
        if request.param == "unfused":
            without_fused(recipe)
        compute_loss = recipe.compute_loss

        def seen(model, batch):
            if len(batches) < STEPS:  # then comes the probe of the save
                batches.append({name: value.clone() for name, value in batch.items()})
            return compute_loss(model, batch)

        recipe.compute_loss = seen
        with_gradient(float("inf"), BAD)(recipe)

    done = train(words(fix64, run), change)
    assert done.error is None
    return run, batches, request.param == "fused"


def test_e01_one_step_is_skipped_and_does_not_count(overflowed):
    """6 steps, 5 updates, one skip; the five updates were made with the first five rates."""
    run, _, _ = overflowed
    lines = journal(run)
    assert [line["skipped"] for line in lines.values()] == [n == BAD for n in range(1, STEPS + 1)]
    assert [line["updates"] for line in lines.values()] == [1, 2, 2, 3, 4, 5]
    assert [line["loss_scale"] for line in lines.values()] == [65536.0] * 2 + [32768.0] * 4
    rates = [line["learning_rate"] for line in lines.values() if not line["skipped"]]
    recipe = load_recipe()
    config = recipe.Config(output_dir="x", max_steps=STEPS, learning_rate=1e-3, warmup_steps=2)
    assert rates == [recipe.learning_rate(config, updates) for updates in range(5)]


def test_e01_the_weights_are_those_of_the_other_five_batches(overflowed):
    """Bit-equal to a plain torch loop over the five batches, without any of our code."""
    run, batches, fused = overflowed
    recipe, lines = load_recipe(), journal(run)
    config = recipe.Config(output_dir="x", model_config=json.loads(PLAIN), max_steps=STEPS,
                           learning_rate=1e-3, warmup_steps=2)  # fmt: skip
    if not fused:
        without_fused(recipe)
    torch.manual_seed(config.seed)
    model = recipe.build_model(config)
    optimizer = recipe.build_optimizer(model, config)
    for step, batch in enumerate(batches, start=1):
        if step == BAD:
            continue
        for group in optimizer.param_groups:
            group["lr"] = lines[step]["learning_rate"]
        scale = 65536.0 if step < BAD else 32768.0
        with torch.autocast("cpu", dtype=torch.float16):
            loss = recipe.compute_loss(model, batch)
        targets = int((batch["labels"][:, 1:] != -100).sum())
        (loss * (1 / targets) * scale).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(1 / scale)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    saved = tensors(run, STEPS)
    for name, parameter in model.named_parameters():
        if f"weights/{name}" in saved:
            assert torch.equal(saved[f"weights/{name}"], parameter), name
