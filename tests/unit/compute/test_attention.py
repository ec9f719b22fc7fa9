# SPDX-License-Identifier: Apache-2.0
"""Packed conversations do not see each other: logits and gradients equal to those apart."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from mprecipes.compute.attention import (
    attention_windows,
    bare_model,
    model_config_of,
    packed_inputs,
    segment_mask,
)
from mprecipes.errors import ConfigError

TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 4, "head_dim": 8},
    "gemma3_text": {
        "sliding_window": 4, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
BACKENDS = ("eager", "sdpa")
LENGTHS = (5, 6, 11)


def model(kind, backend):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **TINY, **KINDS[kind])
    made = AutoModelForCausalLM.from_config(config, attn_implementation=backend)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0)  # attention that matters: leaks show
    return made


def documents():
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (length,), generator=draw) for length in LENGTHS]


def packed(parts, *, padding=0, left=False):
    ids = torch.cat(parts)
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    segments = torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])
    widths = (padding, 0) if left else (0, padding)
    return {
        "input_ids": F.pad(ids, widths)[None],
        "position_ids": F.pad(positions, widths)[None],
        "segment_ids": F.pad(segments, widths, value=-1)[None],
    }


def summed_loss(logits, ids):
    return F.cross_entropy(logits[:-1], ids[1:], reduction="sum")


def apart(made, parts):
    """Gives each document's logits on its own, and the gradients of their summed loss."""
    made.zero_grad()
    logits = [made(input_ids=part[None], use_cache=False).logits[0] for part in parts]
    sum(summed_loss(each, part) for each, part in zip(logits, parts)).backward()
    return [each.detach() for each in logits], [p.grad.clone() for p in made.parameters()]


def together(made, parts, inputs, *, begin=0, **options):
    made.zero_grad()
    whole = made(**{"use_cache": False, **inputs, **options}).logits.flatten(0, 1)[begin:]
    logits = whole[: sum(map(len, parts))].split([len(part) for part in parts])
    sum(summed_loss(each, part) for each, part in zip(logits, parts)).backward()
    return [each.detach() for each in logits], [p.grad.clone() for p in made.parameters()]


def largest(found, wanted):
    return max((a - b).abs().max().item() for a, b in zip(found, wanted))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_apart(kind, backend):
    """Logits of every document differ by less than 1e-5 from those alone, and gradients too."""
    made, parts = model(kind, backend), documents()
    wanted = apart(made, parts)
    for left in (False, True):
        batch = packed(parts, padding=10, left=left)
        found = together(
            made, parts, packed_inputs(made, batch), begin=10 if left else 0
        )  # fmt: skip
        scale = max(each.abs().max().item() for each in wanted[1])
        assert largest(found[0], wanted[0]) < 1e-5
        assert largest(found[1], wanted[1]) < 1e-5 * max(1.0, scale)


def check_flex(kind):
    made, parts = model(kind, "flex_attention"), documents()
    with torch.no_grad():
        given = packed_inputs(made, packed(parts, padding=10))
        logits = made(**given, use_cache=False).logits[0, : sum(LENGTHS)].split(list(LENGTHS))
        made.set_attn_implementation("sdpa")
        wanted = [made(input_ids=part[None], use_cache=False).logits[0] for part in parts]
    assert largest(logits, wanted) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_apart_with_flex_attention(kind):
    """Logits likewise, uncompiled; on processors torch 2.13 has no gradient of flex attention."""
    with torch.compiler.set_stance("force_eager"):
        check_flex(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_apart_with_compiled_flex_attention(kind):
    """As transformers runs it."""
    check_flex(kind)


def test_training_with_flex_attention_needs_a_gpu():
    """Refused with the way out, in place of torch's error from inside the backward."""
    made = model("llama", "flex_attention")
    with pytest.raises(ConfigError) as error:
        packed_inputs(made, packed(documents()))
    assert error.value.found == "flex_attention on cpu"
    assert "gradient on GPUs only" in error.value.expected
    assert error.value.where == "attn_implementation in option tuning"
    assert error.value.action == "tuning: {attn_implementation: sdpa}"


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("leak", ["all-ones mask", "default cache", "no segments"])
def test_planted_leaks_are_seen(backend, leak):
    """Sabotage: the masks that leak today are far outside the tolerance of the test above."""
    made, parts = model("llama", backend), documents()
    batch = packed(parts)
    given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    options = {}
    if leak == "all-ones mask":
        given["attention_mask"] = torch.ones_like(batch["input_ids"])
    elif leak == "default cache":
        options["use_cache"] = True
    else:
        batch["segment_ids"] = torch.zeros_like(batch["segment_ids"])
        given = packed_inputs(made, batch)
    wanted = apart(made, parts)
    found = together(made, parts, given, **options)
    assert largest(found[0], wanted[0]) > 1e-2
    assert largest(found[1], wanted[1]) > 1e-2


def test_a_boolean_mask_for_eager_would_leak():
    """Sabotage: eager attention adds its mask, so a boolean one is as good as none."""
    made, parts = model("llama", "eager"), documents()
    batch = packed(parts)
    given = packed_inputs(made, batch)
    given["attention_mask"] = segment_mask(batch["segment_ids"], "sdpa")
    assert largest(together(made, parts, given)[0], apart(made, parts)[0]) > 1e-2


def test_flash_attention_gets_one_row():
    """For flash attention the batch becomes one row without a mask, restarted positions kept."""
    made = model("llama", "sdpa")
    made.config._attn_implementation = "flash_attention_2"
    batch = {name: each.repeat(2, 1) for name, each in packed(documents(), padding=2).items()}
    given = packed_inputs(made, batch)
    assert set(given) == {"input_ids", "position_ids"}
    assert given["input_ids"].shape == (1, 2 * (sum(LENGTHS) + 2))
    made.config._attn_implementation = "sdpa"
    flat = made(**given, use_cache=False).logits[0]
    rows = made(**packed_inputs(made, batch), use_cache=False).logits.flatten(0, 1)
    real = batch["segment_ids"].flatten() >= 0
    assert (flat - rows)[real].abs().max() < 1e-5


def test_the_mask_of_five_and_six_tokens():
    """A token sees its own document up to itself; padding sees padding, so no row is empty."""
    segments = torch.tensor([[0, 0, 1, 1, -1]])
    allowed = segment_mask(segments, "sdpa")[0, 0].int().tolist()
    assert allowed == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    narrow = segment_mask(torch.zeros(1, 4, dtype=torch.long), "sdpa", 2)[0, 0].int().tolist()
    assert narrow == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_windows_of_the_layers():
    """Layers that see everything, a window, or both; others are refused by name."""
    assert attention_windows(AutoConfig.for_model("llama", **TINY)) == {"full_attention": None}
    both = attention_windows(AutoConfig.for_model("gemma3_text", **TINY, **KINDS["gemma3_text"]))
    assert both == {"full_attention": None, "sliding_attention": 4}
    strange = AutoConfig.for_model("llama", **TINY)
    strange.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ConfigError) as error:
        attention_windows(strange)
    assert error.value.found == "layers of type linear_attention"
    assert "full_attention or sliding_attention" in error.value.expected
    assert error.value.where == "the model's config"
    assert "attn_implementation: sdpa" in error.value.action


def test_unknown_attention_is_refused():
    """An attention of which the mask is not known is refused."""
    made = model("llama", "sdpa")
    made.config._attn_implementation = "paged|eager"
    with pytest.raises(ConfigError) as error:
        packed_inputs(made, packed(documents()))
    assert "paged|eager" in error.value.found


def test_wrappers_are_looked_through():
    """The config of a wrapped model is the model's."""
    made = model("llama", "sdpa")
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.Module()
    wrapped.module.module = made
    assert bare_model(wrapped) is made
    assert model_config_of(wrapped) is made.config
