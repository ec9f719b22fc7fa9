# SPDX-License-Identifier: Apache-2.0
"""The part of a save that needs the live state, and for which the training stands still: a copy."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mprecipes.checkpoint.fragments import owned, replicated
from mprecipes.checkpoint.replicas import ReplicaWindow
from mprecipes.checkpoint.snapshot import (
    HostBuffers,
    describe_parameters,
    full_weights,
    live_tensors,
    working_copies,
)
from mprecipes.checkpoint.storage import share_of
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position
from mprecipes.faults import fault_point


@dataclass(frozen=True)
class Capture:
    """What a save needs of this rank; nothing in it aliases live memory.

    Attributes:
        began: when, on the monotonic clock.
        tensors: this rank's share.
        parameters: `params` and `shapes` of all weights.
        replicas: gives digests of a part of the state that all ranks hold alike.
        state_bytes: of all ranks' shares.
        rank_state: what this rank alone must find again.
        about: `position`, `facts` and `milestone` of the manifest.
        error: why there are no copies; the other ranks must hear of it.
    """

    step: int
    began: float
    tensors: Mapping[str, torch.Tensor]
    parameters: Mapping[str, Mapping[str, Any]]
    replicas: Callable[[], dict[str, str]]
    state_bytes: int
    scaler: Mapping[str, Any] | None
    rank_state: Mapping[str, Any]
    about: Mapping[str, Any]
    error: Exception | None


class Camera:
    """Copies this rank's share of the state into memory that is taken once and reused."""

    def __init__(self, ranks: Ranks, *, pin: bool) -> None:
        self._ranks, self._number = ranks, 0
        self._buffers, self._window = HostBuffers(pin=pin), ReplicaWindow()

    def reserve(self, live: Mapping[str, torch.Tensor]) -> None:
        """Takes the memory; on any thread, while nothing is captured."""
        self._buffers.reserve(self._share(live))
        fault_point("save.reserved")

    def __call__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None,
        position: Position,
        *,
        facts: Mapping[str, Any],
        rank_state: Mapping[str, Any],
        milestone: str | None,
    ) -> Capture:
        """Blocks until everything is copied; the next call overwrites the copies."""
        began, live = time.monotonic(), live_tensors(model, optimizer)
        copies: dict[str, torch.Tensor] = {}
        error: Exception | None = None
        fault_point("save.before_copy", position.step)
        try:
            copies = self._buffers.copy(self._share(live))
            fault_point("save.in_copy", position.step)
            if self._ranks.world_size > 1:
                held = replicated(live) | working_copies(model)
                self._window.copy(held, self._number)
        except (RuntimeError, MemoryError) as problem:  # no memory; the others wait for this rank
            error = problem
        self._number += 1
        about = {"facts": facts, "milestone": milestone, "position": asdict(position)}
        return Capture(
            position.step,
            began,
            copies,
            describe_parameters(full_weights(model)),
            self._window.digests,
            state_bytes(live, self._ranks.world_size),
            copy.deepcopy(scaler.state_dict() or None) if scaler is not None else None,
            copy.deepcopy(rank_state),
            copy.deepcopy(about),
            error,
        )

    def _share(self, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this rank alone holds, and its part of what all hold."""
        all_hold, mine = replicated(live), owned(live)
        share = share_of(all_hold, rank=self._ranks.rank, world_size=self._ranks.world_size)
        return mine | {name: all_hold[name] for name in share}


def state_bytes(live: Mapping[str, torch.Tensor], world_size: int) -> int:
    """Gives the size of the state of all ranks, as far as one of them can tell."""
    all_hold, mine = replicated(live), owned(live)
    own = sum(tensor.nbytes for tensor in mine.values())
    return own * world_size + sum(tensor.nbytes for tensor in all_hold.values())
