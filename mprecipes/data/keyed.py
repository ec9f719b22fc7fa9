# SPDX-License-Identifier: Apache-2.0
"""Keyed numbers in place of random state, and items read under them, here or in a worker.

What a data set draws while it gives an item depends on the key alone: not on the rows read before,
the rank, the number of workers or the process; and the main process's own random streams stay
untouched.
"""

import contextlib
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ITEM_SALT = 0x6974656D
_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}

Tensors = dict[str, torch.Tensor]


def mix64(x: np.ndarray) -> np.ndarray:
    """Gives a 64-bit mix of each uint64 element.

    Source: splitmix64's finaliser (Steele, Lea, Flood 2014; constants of Stafford's variant 13).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def numbered_keys(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Gives the outputs `numbers` (uint64) of the splitmix64 stream that `seed` names."""
    state = mix64(np.array([seed & (2**64 - 1)], dtype=np.uint64) + GOLDEN)
    return mix64(state + (numbers + np.uint64(1)) * GOLDEN)


@dataclass(frozen=True)
class KeyedItems:
    """Gives collated batches by (sample number, row); an item's draws are keyed by (seed, sample).

    A data set with `is_deterministic = True` draws nothing and is read without seeding.
    """

    data: Any
    seed: int

    def __getitems__(self, pairs: Sequence[tuple[int, int]]) -> tuple[int, list[int], Tensors]:
        rows = [row for _, row in pairs]
        if getattr(self.data, "is_deterministic", False):
            items = self._fetch(rows)
        else:
            in_worker = get_worker_info() is not None
            samples = np.array([sample for sample, _ in pairs], dtype=np.uint64)
            items = []
            with contextlib.nullcontext() if in_worker else kept_random_streams():
                for key, row in zip(numbered_keys(self.seed ^ _ITEM_SALT, samples), rows):
                    _seed_host(int(key))
                    items += self._fetch([row])
        return pairs[0][0], rows, default_collate(items)

    def _fetch(self, rows: list[int]) -> list[Tensors]:
        if hasattr(self.data, "__getitems__"):
            return self.data.__getitems__(rows)
        return [self.data[row] for row in rows]


def _seed_host(key: int) -> None:
    random.seed(
        ~key & (2**64 - 1)
    )  # the same key would give it NumPy's stream: the generators are one
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    torch.default_generator.manual_seed(key)  # torch.manual_seed would reseed the devices as well


@contextlib.contextmanager
def kept_random_streams() -> Iterator[None]:
    """Puts the host's random streams back as they were, whatever is drawn inside."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Starts the workers made inside with stop signals blocked, and without a word of `tokenizers`.

    A signal that comes meanwhile reaches this process when the block ends. `tokenizers`, used here
    before, would warn in every forked worker.
    """
    parallelism = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = parallelism or "false"
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if parallelism is None:
            del os.environ["TOKENIZERS_PARALLELISM"]


def start_worker(_: int) -> None:
    """Leaves stop signals to the main process, which needs its workers until it has saved.

    A launcher signals the whole process group (torch 2.13, subprocess_handler.py: `os.killpg`). The
    SIGTERM of the parent itself still ends the worker.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    if sys.platform != "linux":
        return
    parent = os.getppid()

    def wait() -> None:
        while True:
            received = signal.sigwaitinfo(_STOPS)
            if received.si_signo == signal.SIGTERM and received.si_pid == parent:
                os._exit(0)

    threading.Thread(target=wait, name="stop-signals", daemon=True).start()
