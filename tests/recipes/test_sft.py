# SPDX-License-Identifier: Apache-2.0
"""The functions of the SFT recipes: loss over rows of segments, noise, smoothing, adapters."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mprecipes as mp
from mprecipes.compute.ranks import Ranks
from tests.sft import CHAT, LORA, MODEL, load, write_chats


@pytest.fixture(scope="module", params=[CHAT, LORA], ids=["chat", "lora"])
def recipe(request):
    return load(request.param)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """The chats packed and plain, as the recipe's data."""
    folder = tmp_path_factory.mktemp("chats")
    source = write_chats(folder / "rows.jsonl")

    def read(**chat):
        config = SimpleNamespace(
            dataset=str(source), chat=chat, tokenizer=None, model_name_or_path=None, tuning=None,
            seq_length=96, eval_fraction=None,
        )  # fmt: skip
        return mp.read_chats(config, Ranks(), should_stop=lambda: False).train

    return read


def made(recipe, tmp_path, **changed):
    changed = {"model_config": {**MODEL, "attention_dropout": 0.0}, **changed}
    torch.manual_seed(0)
    return recipe.build_model(recipe.Config(output_dir=str(tmp_path), **changed))


def batch_of(data, rows):
    items = data.__getitems__(list(rows))
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def gradient(recipe, model, data, rows, *, micro, world=1):
    """The gradient of a global batch as the recipe makes it; ranks are averaged as DDP does."""
    num_targets = data.num_targets(np.array(rows))
    blocks = [rows[first : first + micro] for first in range(0, len(rows), micro)]
    accumulation = len(blocks) // world
    total = None
    for rank in range(world):
        model.zero_grad()
        for block in blocks[rank::world]:
            scale = accumulation * world / num_targets
            loss = recipe.compute_loss(model, batch_of(data, block)) * scale / accumulation
            loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.requires_grad]
        total = grads if total is None else [a + b for a, b in zip(total, grads)]
    return torch.cat([each.flatten() / world for each in total])


@pytest.mark.parametrize("chat", [{}, {"batching": "plain"}, {"batching": "plain",
                                  "padding_side": "left"}])  # fmt: skip
def test_every_target_weighs_the_same_however_rows_are_shared(recipe, chats, tmp_path, chat):
    """Accumulation 1, 2, 4 and 1 or 2 ranks: the gradient is that of the mean over all targets."""
    model, data = made(recipe, tmp_path), chats(**chat)
    rows = list(range(8))
    batch = batch_of(data, rows)
    logits, labels = recipe.next_token_logits(model, batch)
    model.zero_grad()
    F.cross_entropy(logits, labels, reduction="mean").backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    assert (labels != -100).sum() == data.num_targets(np.array(rows))
    for micro, world in ((8, 1), (4, 1), (2, 1), (4, 2), (2, 2), (1, 2)):
        found = gradient(recipe, model, data, rows, micro=micro, world=world)
        assert (found - wanted).abs().max() <= 1e-6 * max(1.0, wanted.abs().max().item())


def test_the_mean_of_micro_batch_means_would_be_seen(recipe, chats, tmp_path):
    """Sabotage: averaging over micro-batches instead of targets is far outside 1e-6."""
    model, data = made(recipe, tmp_path), chats(batching="plain")
    wanted = gradient(recipe, model, data, [0, 1, 2, 3], micro=4)
    model.zero_grad()
    for row in range(4):
        batch = batch_of(data, [row])
        (recipe.compute_loss(model, batch) / data.num_targets(np.array([row])) / 4).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    assert (found - wanted).abs().max() > 1e-3 * wanted.abs().max()


def test_packed_rows_have_the_losses_of_their_conversations(recipe, chats, tmp_path):
    """The summed loss over all packed rows is that over all conversations on their own."""
    model = made(recipe, tmp_path)
    packed, plain = chats(), chats(batching="plain")
    assert len(packed) < len(plain)
    with torch.no_grad():
        sums = [
            sum(
                recipe.compute_loss(model, batch_of(data, [row])).item() for row in range(len(data))
            )
            for data in (packed, plain)
        ]
    targets = [data.num_targets(np.arange(len(data))) for data in (packed, plain)]
    assert targets[0] == targets[1]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)


def test_label_smoothing_is_spread_over_the_vocabulary(recipe, chats, tmp_path):
    """The loss is (1 - e) nll + e * the mean of -log p over the vocabulary."""
    model = made(recipe, tmp_path, tuning={"label_smoothing_factor": 0.1})
    batch = batch_of(chats(), [0, 1])
    with torch.no_grad():
        logits, labels = recipe.next_token_logits(model, batch)
        logp = logits.log_softmax(-1)[labels != -100]
        nll = -logp.gather(1, labels[labels != -100][:, None]).sum()
        wanted = 0.9 * nll - 0.1 * logp.mean(dim=1).sum()
        assert recipe.compute_loss(model, batch).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_neftune_noise_is_keyed_and_only_in_training(recipe, chats, tmp_path):
    """The same micro-batch key gives the same loss, another key another, evaluation has none."""
    noisy = made(recipe, tmp_path, tuning={"neftune_noise_alpha": 5.0}).train()
    plain, batch = made(recipe, tmp_path).train(), batch_of(chats(), [0, 1])

    def loss(model, sample):
        mp.seed_micro_batch(1, sample)
        with torch.no_grad():
            return recipe.compute_loss(model, batch).item()

    assert loss(noisy, 0) == loss(noisy, 0)
    assert len({loss(noisy, 0), loss(noisy, 2), loss(plain, 0)}) == 3
    assert loss(noisy.eval(), 0) == loss(plain.eval(), 0)


def test_what_is_trained(tmp_path):
    """sft_chat trains every parameter, sft_lora the adapters alone; all of them are FP32."""
    full, adapted = (made(load(path), tmp_path) for path in (CHAT, LORA))
    assert all(p.requires_grad for p in full.parameters())
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in adapted.named_parameters() if "lora_" in name} != set()
    dtypes = {p.dtype for model in (full, adapted) for p in model.parameters()}
    assert dtypes == {torch.float32}


def test_code_of_a_model_is_not_trusted_by_default(recipe, tmp_path):
    """A folder that brings its own code is refused unless the option asks for it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": '
        '"own.Own"}}'
    )
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\n")
    with pytest.raises(mp.ConfigError) as error:
        made(recipe, tmp_path, model_name_or_path=str(folder), model_config=None)
    assert "trust_remote_code" in error.value.action
    assert not (tmp_path / "ran").exists()


def test_the_two_recipes_differ_in_data_lines_only():
    """Both have the same options but `lora`."""
    names = [
        {field.name for field in dataclasses.fields(load(path).Config)} for path in (CHAT, LORA)
    ]
    assert names[1] - names[0] == {"lora"}
    assert names[0] <= names[1]
