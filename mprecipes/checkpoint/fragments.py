# SPDX-License-Identifier: Apache-2.0
"""Fragments: contiguous ranges of flattened tensors, the unit in which sharded state is stored.

A tensor that every rank holds is stored whole, under its name, by one of them. What one rank alone
holds of a tensor (an FSDP2 shard, a ZeRO partition) is the range `start .. stop - 1` of the
flattened tensor, stored one-dimensional under `NAME[START:STOP of ROWSxCOLUMNS]`, also where the
range is all of it. Names and indices are those of the full tensor, so any engine on any number of
ranks finds the ranges it needs, and digests of parts add up to the digest of the whole.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from mprecipes.errors import VerificationError

_KEY = re.compile(r"(.+)\[(\d+):(\d+) of (\d+(?:x\d+)*)\]", re.DOTALL)


@dataclass(frozen=True)
class Fragment:
    """A range of a full tensor.

    Attributes:
        name: of the full tensor, such as `weights/head.weight`.
        shape: of the full tensor.
        start, stop: first and last + 1 element of the flattened full tensor.
        is_own: held by one rank alone; else every rank holds it.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    is_own: bool

    @property
    def key(self) -> str:
        if not self.is_own:
            return self.name
        return f"{self.name}[{self.start}:{self.stop} of {'x'.join(map(str, self.shape))}]"


def fragment_of(key: str, tensor: torch.Tensor) -> Fragment:
    """Gives what `tensor` is when it is stored, or live, under `key`.

    Raises:
        ValueError: the range lies outside of the full tensor or is not as long as `tensor`.
    """
    if (found := _KEY.fullmatch(key)) is None:
        return Fragment(key, tuple(tensor.shape), 0, tensor.numel(), is_own=False)
    name, start, stop, lengths = found.groups()
    shape = tuple(int(length) for length in lengths.split("x"))
    fragment = Fragment(name, shape, int(start), int(stop), is_own=True)
    size = fragment.stop - fragment.start
    if size != tensor.numel() or tensor.dim() != 1 or fragment.stop > math.prod(shape):
        raise ValueError(f"{key} is a tensor of shape {list(tensor.shape)}")
    return fragment


def own_key(name: str, shape: Iterable[int], start: int, part: torch.Tensor) -> str:
    """Gives the key of a rank's own flat `part` of a full tensor."""
    return Fragment(name, tuple(shape), start, start + part.numel(), is_own=True).key


def is_own(key: str) -> bool:
    """Whether one rank alone holds what lies under `key`."""
    return _KEY.fullmatch(key) is not None


def name_of(key: str) -> str:
    """Gives the name of the full tensor."""
    found = _KEY.fullmatch(key)
    return found[1] if found else key


def replicated(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gives what every rank holds."""
    return {key: tensor for key, tensor in tensors.items() if not is_own(key)}


def owned(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gives what this rank alone holds."""
    return {key: tensor for key, tensor in tensors.items() if is_own(key)}


def full_tensors(parts: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Gives the full tensors that stored parts make up, without memory (device "meta").

    Raises:
        VerificationError: parts overlap, leave gaps, or disagree on shape or dtype.
    """
    found: dict[str, list[tuple[Fragment, torch.dtype]]] = {}
    for key, tensor in parts:
        fragment = fragment_of(key, tensor)
        found.setdefault(fragment.name, []).append((fragment, tensor.dtype))
    full = {}
    for name, pieces in found.items():
        first, dtype = pieces[0]
        ends = [0]
        for fragment, other in sorted(pieces, key=lambda piece: piece[0].start):
            if (fragment.shape, other, fragment.start) != (first.shape, dtype, ends[-1]):
                raise _unfit(name, fragment, other, f"{dtype} {list(first.shape)}", ends[-1])
            ends.append(fragment.stop)
        if ends[-1] != math.prod(first.shape):
            raise _unfit(name, first, dtype, f"{math.prod(first.shape)} elements", ends[-1])
        full[name] = torch.empty(first.shape, dtype=dtype, device="meta")
    return full


def _unfit(
    name: str, fragment: Fragment, dtype: torch.dtype, whole: str, end: int
) -> VerificationError:
    return VerificationError(
        f"{fragment.key} is {dtype} {list(fragment.shape)}, the parts before it end at {end}",
        expected=f"parts that make up {name}, {whole}, without gap or overlap",
        where="the tensors of the checkpoint",
        action="do not use this checkpoint; launch again and the newest one that verifies is taken",
    )
