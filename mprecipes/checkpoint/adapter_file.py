# SPDX-License-Identifier: Apache-2.0
"""The weights of adapters as the one file that `peft` reads.

On disk: `adapter_model.safetensors`, beside `adapter_config.json`. A weight's name there is that of
the checkpoint without the name of its adapter (source: peft 0.19, utils/save_and_load.py,
`remove_adapter_name`). Adapters are small: they are held in memory.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"
_NAME = re.compile(r"\.(lora_[A-Za-z_]+)\.default(?=\.|$)")


def name_in_file(name: str) -> str:
    """Gives the name that `peft` looks for: `...lora_A.default.weight` is `...lora_A.weight`."""
    short = _NAME.sub(r".\1", name)
    return short.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


class AdapterWriter:
    """Context manager that takes values in any order and pieces, and writes the file at its end.

    Args:
        dtypes, shapes: of every weight, by its name in the checkpoint.
    """

    def __init__(
        self, folder: Path, dtypes: Mapping[str, torch.dtype], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self._path = folder / FILE
        self._tensors = {
            name: torch.empty(tuple(shapes[name]), dtype=dtype) for name, dtype in dtypes.items()
        }

    def __enter__(self) -> "AdapterWriter":
        return self

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Puts one-dimensional values to their place in the flattened weight."""
        self._tensors[name].view(-1)[start : start + len(values)] = values

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            tensors = {name_in_file(name): tensor for name, tensor in self._tensors.items()}
            safetensors.torch.save_file(tensors, self._path, metadata={"format": "pt"})


def read_adapter(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Gives what the file holds by the checkpoint's names; one that is no other's by its own."""
    known = {name_in_file(name): name for name in names}
    tensors = safetensors.torch.load_file(folder / FILE)
    return {known.get(name, name): tensor for name, tensor in tensors.items()}
