# SPDX-License-Identifier: Apache-2.0
"""What the checkpoint benchmarks save and load: a Llama with AdamW, as after its first update."""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

REPOSITORY = Path(__file__).resolve().parents[1]
SIZES = {
    "150m": {"hidden_size": 768, "intermediate_size": 2048, "layers": 14, "vocab_size": 32000},
    "7m": {"hidden_size": 240, "intermediate_size": 640, "layers": 4, "vocab_size": 8000},
    "23m": {"hidden_size": 384, "intermediate_size": 1024, "layers": 6, "vocab_size": 16000},
}


def make_state(size: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Gives a model in FP32 and its AdamW with moments."""
    fields = dict(SIZES[size])
    config = LlamaConfig(
        num_hidden_layers=fields.pop("layers"), num_attention_heads=12, num_key_value_heads=12,
        **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(SIZES), action="append")
    parser.add_argument("--rounds", type=int, default=5, help="measured after a first one")
    parser.add_argument("--dir", type=Path, help="where to write; default beside the repository")
    given = parser.parse_args()
    given.size = given.size or ["150m", "23m"]
    return given


def working_folder(given: argparse.Namespace) -> tempfile.TemporaryDirectory:
    """A temporary folder on the disk that is measured."""
    return tempfile.TemporaryDirectory(prefix="bench-", dir=given.dir or REPOSITORY.parent)


class Table:
    """Seconds by row and column over rounds; medians, and ratios against targets."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], list[float]] = {}

    def add(self, row: str, **columns: float) -> None:
        for column, seconds in columns.items():
            self._seconds.setdefault((row, column), []).append(seconds)

    def drop_first(self) -> None:
        """Forgets the first round: allocation, first use, imports."""
        self._seconds = {key: values[1:] for key, values in self._seconds.items()}

    def median(self, row: str, column: str) -> float:
        return statistics.median(self._seconds[row, column])

    def show(self, title: str, columns: list[str], num_bytes: int) -> None:
        print(f"\n{title} ({num_bytes / 1e9:.3f} GB; medians, [lowest - highest])")
        print(f"  {'':34}" + "".join(f"{column:>28}" for column in columns))
        for row in dict.fromkeys(row for row, _ in self._seconds):
            cells = ""
            for column in columns:
                values = self._seconds.get((row, column), [])
                text = ""
                if values:
                    spread = f"[{min(values):.2f} - {max(values):.2f}]"
                    text = f"{statistics.median(values):.3f} s {spread}"
                cells += f"{text:>28}"
            print(f"  {row:34}{cells}")

    def paired(self, one: tuple[str, str], other: tuple[str, str]) -> float:
        """The median over rounds of the ratio within a round."""
        pairs = zip(self._seconds[one], self._seconds[other], strict=True)
        return statistics.median(a / b for a, b in pairs)


def check(what: str, found: float, limit: float, *, at_most: bool = True) -> None:
    """Prints a ratio with its target."""
    passed = found <= limit if at_most else found >= limit
    sign = "<=" if at_most else ">="
    print(f"  {'pass' if passed else 'FAIL'}  {what}: {found:.3f} ({sign} {limit})")


def forget(place: Path) -> None:
    """Reads the files of a place, which must be durable, and lets the kernel forget their pages.

    What lies below the kernel (a hypervisor's cache, a drive's own) then knows the same of all that
    is measured, whatever was read before.
    """
    os.sync()
    memory = bytearray(8 << 20)
    for path in place.rglob("*") if place.is_dir() else [place]:
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(memory):
                    pass
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


Engine = Callable[[], dict[str, float]]
