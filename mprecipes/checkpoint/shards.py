# SPDX-License-Identifier: Apache-2.0
"""The weights of a Hugging Face folder: what lies where is known before a byte is written.

On disk: `model.safetensors`, or `model-00001-of-00003.safetensors`, ... with
`model.safetensors.index.json`, as `save_pretrained` writes them. Since every value has its place
from the start, values may be written in any order and number of pieces.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mprecipes.checkpoint.storage import DTYPES, SUFFIX, bytes_of
from mprecipes.errors import ConfigError

INDEX = f"model{SUFFIX}.index.json"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        header: its first bytes, up to the values.
        offsets: parameter -> where its values begin in the file.
        num_bytes: size of the file.
    """

    path: str
    header: bytes
    offsets: dict[str, int]
    num_bytes: int


def parse_size(text: str) -> int:
    """Gives the bytes that `2GB`, `500MB` or `1GiB` stand for.

    Raises:
        ConfigError: it is no such size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if size < 1:
        raise ConfigError(
            f"max_shard_size {text!r}",
            expected="a number and a unit: KB, MB, GB (powers of 1000) or KiB, MiB, GiB",
            where="--max_shard_size",
            action="write for example --max_shard_size 2GB",
        )
    return size


def plan_shards(
    dtypes: Mapping[str, torch.dtype], shapes: Mapping[str, Sequence[int]], max_bytes: int
) -> list[Shard]:
    """Cuts parameters, in their order, into files of at most `max_bytes`.

    One that alone is larger has a file of its own.
    """
    groups: list[list[str]] = [[]]
    room = max_bytes
    sizes = {name: dtypes[name].itemsize * math.prod(shapes[name]) for name in dtypes}
    for name, size in sizes.items():
        if groups[-1] and size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= size
    many = len(groups) > 1
    return [
        _shard(
            f"model-{number:05d}-of-{len(groups):05d}{SUFFIX}" if many else f"model{SUFFIX}",
            {name: (dtypes[name], shapes[name], sizes[name]) for name in names},
        )
        for number, names in enumerate(groups, start=1)
    ]


def index_of(shards: Sequence[Shard], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Gives the value of `model.safetensors.index.json`."""
    places = {name: shard.path for shard in shards for name in shard.offsets}
    return {
        "metadata": {
            "total_parameters": sum(math.prod(shapes[name]) for name in places),
            "total_size": sum(shard.num_bytes - len(shard.header) for shard in shards),
        },
        "weight_map": dict(sorted(places.items())),
    }


class ShardWriter:
    """Writes values to their places; a context manager that makes the files durable.

    Raises:
        OSError: the disk refused.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        self._files = {
            name: (folder / shard.path, offset)
            for shard in shards
            for name, offset in shard.offsets.items()
        }
        for shard in shards:
            with open(folder / shard.path, "xb") as file:
                file.write(shard.header)
                file.truncate(shard.num_bytes)
        self._paths = [folder / shard.path for shard in shards]

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for path in self._paths if kind is None else ():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Writes contiguous values from number `start` of the parameter on; from any thread."""
        path, offset = self._files[name]
        data, offset = bytes_of(values), offset + start * values.itemsize
        descriptor = os.open(path, os.O_WRONLY)
        try:
            while data:
                count = os.pwrite(descriptor, data, offset)
                data, offset = data[count:], offset + count
        finally:
            os.close(descriptor)


def _shard(path: str, members: Mapping[str, tuple[torch.dtype, Sequence[int], int]]) -> Shard:
    """Source: github.com/huggingface/safetensors, README, "Format"; wide elements first: aligned.

    transformers reads a file only if its `__metadata__` says `format: pt`.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    relative, end = {}, 0
    for name in sorted(members, key=lambda name: -members[name][0].itemsize):
        dtype, shape, size = members[name]
        relative[name], begin, end = end, end, end + size
        fields[name] = {
            "dtype": DTYPES[dtype],
            "shape": [*shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + offset for name, offset in relative.items()}
    return Shard(path, header, offsets, len(header) + end)
