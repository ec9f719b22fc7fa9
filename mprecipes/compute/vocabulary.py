# SPDX-License-Identifier: Apache-2.0
"""A product over the vocabulary whose size is a multiple of 8, 16, ...: `pad_vocab_to_multiple_of`.

Only the product is larger. The weight is padded with zeros as it is read and the extra logits are
cut off again: no token is added that could be predicted or enter the loss, and parameters, their
names, the optimizer, checkpoints and exports are those of the vocabulary itself.
"""

from typing import Any

import torch
import torch.nn.functional as F

from mprecipes.errors import ConfigError


def output_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """Gives the module that makes logits of a transformers model, bare or wrapped; else None."""
    from transformers import PreTrainedModel  # seconds, and here only

    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    head: Any = None if inner is None else inner.get_output_embeddings()
    return head if isinstance(head, torch.nn.Module) else None


def pad_vocabulary(model: torch.nn.Module, multiple: int) -> list[int]:
    """In place: the head's product has a multiple of `multiple` columns.

    Returns:
        size of the vocabulary, and of the product.

    Raises:
        ConfigError: the model has no head that is a plain Linear.
    """
    head = output_head(model)
    if type(head) is not torch.nn.Linear:
        raise ConfigError(
            f"pad_vocab_to_multiple_of with a head of {type(head).__name__}",
            expected="a transformers model whose logits come from a Linear",
            where="pad_vocab_to_multiple_of in option numerics",
            action="leave it out; choose a vocab_size in model_config that is a multiple",
        )
    size = head.out_features
    padded = -(-size // multiple) * multiple
    if padded != size:
        head.forward = _padded(head, padded - size)  # type: ignore[method-assign]
    return [size, padded]


def _padded(head: torch.nn.Linear, rows: int) -> Any:
    def forward(input: torch.Tensor) -> torch.Tensor:
        weight = F.pad(head.weight, (0, 0, 0, rows))
        bias = None if head.bias is None else F.pad(head.bias, (0, rows))
        return F.linear(input, weight, bias)[..., :-rows]

    return forward
