# SPDX-License-Identifier: Apache-2.0
"""Random numbers as a function of the data: keyed by seed and sample number, not by rank or step.

With the same micro-batch size a dropout mask follows its micro-batch to whatever rank computes it.
The Python, NumPy and torch streams are saved and restored all the same, for code we do not own.
"""

import base64
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mprecipes.errors import VerificationError

_MASK = (1 << 64) - 1


def random_key(*parts: int) -> int:
    """Gives a well-mixed 63-bit key of a tuple of integers.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), chained over the parts.
    """
    key = 0
    for part in parts:
        key = (key ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key >> 1


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seeds torch alike on every rank (for the initial weights), Python and NumPy apart by rank."""
    random.seed(random_key(seed, rank, 1))
    np.random.seed(random_key(seed, rank, 2) & 0xFFFFFFFF)
    torch.manual_seed(seed)


def seed_micro_batch(seed: int, first_sample: int) -> None:
    """Seeds torch on every device for the forward pass of one micro-batch.

    Args:
        seed: of the run.
        first_sample: number of the micro-batch's first sample in the run's order.
    """
    torch.manual_seed(random_key(seed, first_sample, 3))


def capture_random_state(device: torch.device) -> dict[str, Any]:
    """Gives the Python, NumPy and torch streams of this process as plain JSON values."""
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    state = {
        "python": [version, list(words), gauss],
        "numpy": {
            "bit_generator": numpy_state["bit_generator"],
            "key": [int(word) for word in numpy_state["state"]["key"]],
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": _encode(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Puts back what `capture_random_state` gave; call it last, before anything iterates.

    Raises:
        VerificationError: a stream is missing or not in the form it was saved in.
    """
    try:
        version, words, gauss = state["python"]
        python_state = (version, tuple(words), gauss)
        numpy_state = {
            "bit_generator": state["numpy"]["bit_generator"],
            "state": {
                "key": np.array(state["numpy"]["key"], dtype=np.uint32),
                "pos": state["numpy"]["pos"],
            },
            "has_gauss": state["numpy"]["has_gauss"],
            "gauss": state["numpy"]["gauss"],
        }
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(_decode(state["torch"]))
        if device.type == "cuda" and "cuda" in state:  # a run may move from CPU to GPU
            torch.cuda.set_rng_state(_decode(state["cuda"]), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise VerificationError(
            f"random state that cannot be restored ({type(error).__name__}: {error})",
            expected="the streams python, numpy and torch as they were saved",
            where="random state of this rank",
            action="resume from the previous checkpoint: move this one to quarantine/",
        ) from error


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Puts the Python, NumPy and torch streams back as they were, whatever is drawn inside."""
    python_state, numpy_state, torch_state = (
        random.getstate(),
        np.random.get_state(),
        _streams(device),
    )
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(torch_state[1], device)


def random_state_digest() -> str:
    """Gives 16 hex digits over this process's Python, NumPy and torch streams (host only)."""
    numpy_state: Any = np.random.get_state(legacy=True)
    host = repr((random.getstate(), numpy_state[0], numpy_state[1].tolist(), numpy_state[2:]))
    text = host.encode() + torch.get_rng_state().numpy().tobytes()
    return hashlib.sha256(text).hexdigest()[:16]


def _streams(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
