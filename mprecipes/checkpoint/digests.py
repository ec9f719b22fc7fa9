# SPDX-License-Identifier: Apache-2.0
"""State digests: 64 bits that say live tensors are what they were, wherever they live.

Names and kinds of state; the digest itself, linear in the bytes, is in `compute/digest.py`.
"""

from collections.abc import Iterable, Mapping

import torch

from mprecipes.checkpoint.fragments import fragment_of
from mprecipes.compute.digest import sum_digest


def tensor_digest(tensor: torch.Tensor, name: str, offset: int = 0) -> int:
    """Gives the digest of a tensor, or of a part of one, as an integer below 2^64.

    Args:
        name: of the parameter; equal values under another name give another digest.
        offset: index, in the full parameter, of the part's first element. Parts add up modulo 2^64.
    """
    return sum_digest([(tensor, name, offset)])


def state_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Gives one digest, 16 hex digits, of all weights and one of each kind of optimizer state.

    Args:
        tensors: as `snapshot.live_tensors` names them, live or copies; in full or fragments, whose
            digests add up over ranks.
    """
    parts = ((fragment_of(key, tensor), tensor) for key, tensor in tensors.items())
    digests = digests_of_parts(
        (kind, tensor, name, part.start)
        for part, tensor in parts
        for kind, name in (kind_and_name(part.name),)
    )
    return {"weights": "0" * 16, **digests} if "weights" not in digests else digests


def digests_of_parts(parts: Iterable[tuple[str, torch.Tensor, str, int]]) -> dict[str, str]:
    """Gives one digest a kind of parts (kind, tensor, parameter name, offset as in one tensor)."""
    kinds: dict[str, list[tuple[torch.Tensor, str, int]]] = {}
    for kind, tensor, name, offset in parts:
        kinds.setdefault(kind, []).append((tensor, name, offset))
    return _text({kind: sum_digest(parts) for kind, parts in kinds.items()})


def kind_and_name(full_name: str) -> tuple[str, str]:
    """Gives ("exp_avg", "head.weight") for `optimizer/head.weight/exp_avg`, or ("weights", ...)."""
    kind, _, name = full_name.partition("/")
    if kind == "optimizer":
        name, _, kind = name.rpartition("/")
    return kind, name


def add_digests(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Gives the digests of a state from those of its parts."""
    totals: dict[str, int] = {}
    for part in parts:
        for kind, digest in part.items():
            totals[kind] = totals.get(kind, 0) + int(digest, 16)
    return _text(totals)


def _text(totals: Mapping[str, int]) -> dict[str, str]:
    return {kind: f"{total % (1 << 64):016x}" for kind, total in sorted(totals.items())}
