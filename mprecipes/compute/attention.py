# SPDX-License-Identifier: Apache-2.0
"""What a causal LM is given so that conversations in one row do not see each other.

The mask is made from the row's segment ids for the attention that the model runs with, and handed
over in full: an all-ones mask, or the default cache, silently switches off what transformers
derives from restarted positions (measured: logits off by 0.45 to 0.5). What a token may attend to:
tokens before it, or itself, of its own segment, within the layer's sliding window if it has one.
Padding is a segment of its own, so that no row of the softmax is empty.
"""

from collections.abc import Mapping
from typing import Any, get_args

import torch

from mprecipes.compute.tuning import Attention
from mprecipes.errors import ConfigError

BACKENDS = get_args(Attention)
_FLASH = tuple(name for name in BACKENDS if name.startswith("flash_"))
_KINDS = ("full_attention", "sliding_attention")


def bare_model(model: torch.nn.Module) -> torch.nn.Module:
    """Gives the model inside DDP and other wrappers that call it `module`."""
    while "module" in model._modules:
        model = model.get_submodule("module")
    return model


def model_config_of(model: torch.nn.Module) -> Any:
    """Gives the transformers config of a model, also of a wrapped one."""
    return bare_model(model).config


def packed_inputs(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Gives the arguments of the model's forward for rows of segments; add `use_cache=False`.

    With flash attention the batch becomes one row, (1, batch * seq): logits flattened over the
    first two dimensions are in the same places either way.

    Args:
        batch: `input_ids`, `position_ids` and `segment_ids`, (batch, seq) each.

    Raises:
        ConfigError: the model's attention cannot be kept inside segments.
    """
    config = model_config_of(model)
    backend = config._attn_implementation
    if backend not in BACKENDS:
        raise _refused(f"attention {backend!r}", "one of " + ", ".join(BACKENDS))
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    if backend == "flex_attention" and torch.is_grad_enabled() and not inputs["input_ids"].is_cuda:
        raise ConfigError(
            f"flex_attention on {inputs['input_ids'].device}",
            expected="sdpa or eager: flex attention has a gradient on GPUs only (torch 2.13)",
            where="attn_implementation in option tuning",
            action="tuning: {attn_implementation: sdpa}",
        )
    if backend in _FLASH:
        return {**{name: ids.reshape(1, -1) for name, ids in inputs.items()}}
    masks = {
        kind: segment_mask(batch["segment_ids"], backend, window)
        for kind, window in attention_windows(config).items()
    }
    single = next(iter(masks.values())) if len(masks) == 1 else masks
    return {**inputs, "attention_mask": single}


def attention_windows(config: Any) -> dict[str, int | None]:
    """Gives the sliding window of each kind of layer, None for one that sees everything.

    Raises:
        ConfigError: some layer is neither, such as a recurrent one, which carries state over from
            one segment to the next.
    """
    window = getattr(config, "sliding_window", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    if not kinds:
        return {"sliding_attention" if window else "full_attention": window}
    if strange := [kind for kind in kinds if kind not in _KINDS]:
        raise _refused(f"layers of type {', '.join(strange)}", " or ".join(_KINDS))
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def segment_mask(segments: torch.Tensor, backend: str, window: int | None = None) -> Any:
    """Gives the mask of one kind of layer, in the form its attention takes.

    Args:
        segments: (batch, seq).
        backend: "sdpa" takes a boolean mask, "eager" one to add, "flex_attention" a block mask.
        window: how many tokens back a token sees, itself included; None is all.
    """
    length = segments.shape[1]
    if backend == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        def may_see(b: Any, _: Any, query: Any, key: Any) -> Any:
            allowed = (query >= key) & (segments[b, query] == segments[b, key])
            return allowed & (query - key < window) if window else allowed

        return create_block_mask(
            may_see, len(segments), None, length, length, device=str(segments.device)
        )
    places = torch.arange(length, device=segments.device)
    distance = places[:, None] - places[None, :]
    allowed = (distance >= 0) & (segments[:, :, None] == segments[:, None, :])
    if window:
        allowed &= distance < window
    allowed = allowed[:, None]
    if backend == "sdpa":
        return allowed
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape, device=segments.device).masked_fill(~allowed, lowest)


def _refused(found: str, expected: str) -> ConfigError:
    return ConfigError(
        found,
        expected=f"{expected}, so that conversations in a row cannot see each other",
        where="the model's config",
        action="choose another model, or another tuning: {attn_implementation: sdpa}",
    )
