# SPDX-License-Identifier: Apache-2.0
"""Which tensors a safetensors file holds, read from its header alone, also when it is damaged.

One digest covers a whole file, so a file that does not verify makes all its tensors doubtful; this
gives their names to the people who must decide what they have lost. Trusts nothing and never fails.
"""

import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from mprecipes.checkpoint.fragments import name_of

SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100 << 20  # Source: safetensors/src/tensor.rs, MAX_HEADER_SIZE is 100 MB
SHOWN = 6


def tensors_in(path: Path) -> list[str]:
    """Gives the names in the header of a safetensors file; none when it cannot be read."""
    try:  # a hostile folder may hold a link or a pipe in its place
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            return names_in(file, found.st_size) if stat.S_ISREG(found.st_mode) else []
    except OSError:
        return []


def names_in(file: BinaryIO, num_bytes: int) -> list[str]:
    """Gives the names in the header of an open safetensors file of a known size, or none.

    Reads the header only. Source: github.com/huggingface/safetensors, README, "Format".
    """
    size = int.from_bytes(file.read(8), "little")
    if size > min(MAX_HEADER_BYTES, num_bytes):
        return []
    try:
        header = json.loads(file.read(size))
    except (ValueError, RecursionError):
        return []
    names = header if isinstance(header, dict) else ()
    return [name for name in names if name != "__metadata__"]


def doubtful(
    folder: Path, name: str, others: Iterable[str], params: Mapping[str, str]
) -> list[str]:
    """Gives the tensors that were in a damaged file of a checkpoint, as far as can be known.

    Args:
        name: of the damaged file; of other kinds than safetensors none.
        others: names of all files of the checkpoint.
        params: the manifest's: where the header is damaged or gone, the weights that no other file
            holds were in this one.
    """
    if not name.endswith(SUFFIX):
        return []
    if found := tensors_in(folder / name):
        return found
    held = {
        name_of(tensor)
        for other in others
        if other != name and other.endswith(SUFFIX)
        for tensor in tensors_in(folder / other)
    }
    return [f"weights/{param}" for param in params if f"weights/{param}" not in held]


def listed(names: Sequence[str]) -> str:
    """Gives names in one short phrase: the first ones, and how many more there are."""
    more = len(names) - SHOWN
    text = ", ".join(names[:SHOWN])
    return f"{text} and {more} more" if more > 0 else text
