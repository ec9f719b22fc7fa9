# SPDX-License-Identifier: Apache-2.0
"""How many bytes a training step sends to other processes, measured on what really ran.

PyTorch's flight recorder keeps the last 2000 collectives of a process, those of DDP's C++ reducer
and of DeepSpeed included, on NCCL and gloo, by default. The bytes of one whole step are read from
it once: reading costs milliseconds, and steps do not differ.

Source: torch 2.13, torch/csrc/distributed/c10d/FlightRecorder.hpp, `_dump_fr_trace_json`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

METRIC = "perf/communicated_bytes"
_FIRST, _LAST = 2, 3  # the third step: what is done once, such as DDP's new buckets, is over
_BITS = {
    "Float": 32, "Double": 64, "Half": 16, "BFloat16": 16, "Long": 64, "Int": 32, "Short": 16,
    "Char": 8, "Byte": 8, "Bool": 8, "Float8_e4m3fn": 8, "Float8_e5m2": 8,
}  # fmt: skip


class Traffic:
    """Measures one step of a process; with one process there is nothing to measure."""

    def __init__(self, world_size: int) -> None:
        self._world_size, self._steps, self._before = world_size, 0, -1
        self._found: dict[str, int] = {}

    def step_ended(self) -> None:
        """Call it once a step, at the same place."""
        self._steps += 1
        if self._world_size == 1 or self._steps not in (_FIRST, _LAST):
            return
        entries = _recorded()
        last = max((entry["record_id"] for entry in entries), default=-1)
        if self._steps == _FIRST:
            self._before = last
            return
        new = [entry for entry in entries if entry["record_id"] > self._before]
        if len(new) == last - self._before:  # else the recorder was too short for a step
            self._found = {METRIC: sent_bytes(new, self._world_size)}

    def news(self) -> dict[str, int]:
        """Gives the metric once, after the step in which it was measured; else nothing."""
        found, self._found = self._found, {}
        return found


def sent_bytes(entries: Iterable[Mapping[str, Any]], world_size: int) -> int:
    """Gives the bytes one rank sends when each collective runs as a ring.

    Args:
        entries: of the flight recorder.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", 2005: an all-reduce sends 2 (n - 1) / n of its data, a gather or scatter half of that.
    """
    total, share = 0.0, (world_size - 1) / world_size
    for entry in entries:
        name = entry["profiling_name"].rpartition(":")[2]
        given = _bytes(entry["input_sizes"], entry["input_dtypes"])
        taken = _bytes(entry["output_sizes"], entry["output_dtypes"])
        if "barrier" in name:
            continue
        if "gather" in name or "scatter" in name or "all_to_all" in name:
            total += share * max(given, taken)
        elif "all_reduce" in name or "allreduce" in name:
            total += 2 * share * given
        else:
            total += max(given, taken)
    return round(total)


def _bytes(sizes: list[list[int]], dtypes: list[str]) -> int:
    wide = dtypes[0] if dtypes else "Byte"
    names = [*dtypes, *[wide] * (len(sizes) - len(dtypes))]
    return sum(math.prod(size) * _BITS.get(name, 8) // 8 for size, name in zip(sizes, names))


def _recorded() -> list[dict[str, Any]]:
    text = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    return list(json.loads(text).get("entries", []))
