# SPDX-License-Identifier: Apache-2.0
"""The processes that share the work: small collectives, and how a global batch is shared.

Every method that communicates is collective: every rank calls it, in the same order, under the time
limit the process group was made with. With one process nothing is communicated.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mprecipes.compute.delivery import spread
from mprecipes.compute.divisors import divisors, nearest
from mprecipes.errors import ConfigError
from mprecipes.identity.files import Parcel

T = TypeVar("T")
HEARTBEAT_SECONDS = 5.0


@dataclass(frozen=True)
class Ranks:
    """This process among its peers.

    Attributes:
        rank: 0 .. world_size - 1 over all machines.
        world_size: number of processes of the launch.
        group: host (gloo) process group for objects and small sums; None with one process.
        timeout_seconds: limit of every collective on `group`.
        writers: ranks that write what belongs to the run: rank 0, or the first rank of each node
            where each node has a run folder of its own (`with_node_writers`).
        writer_group: host group of the writers; None with one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    group: Any = None
    timeout_seconds: float = 600
    writers: tuple[int, ...] = (0,)
    writer_group: Any = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def writes_here(self) -> bool:
        return self.rank in self.writers

    def writer_of(self, rank: int) -> int:
        """Gives the rank that writes on the disk that `rank` sees."""
        return max(writer for writer in self.writers if writer <= rank)

    def with_own_group(self) -> "Ranks":
        """Collective: the same processes on host groups of their own, for another thread."""
        if self.world_size == 1:
            return self
        return replace(self, group=self._new_group(), writer_group=self._new_writer_group())

    def with_node_writers(self) -> "Ranks":
        """Collective: the same processes, of which the first of each node writes there.

        Ranks of a node are consecutive, as launchers number them.
        """
        firsts = self.gather(self.local_rank == 0)
        each = replace(self, writers=tuple(rank for rank, first in enumerate(firsts) if first))
        return replace(each, writer_group=each._new_writer_group())

    def share(self, value: T, source: int = 0) -> T:
        """Collective: gives every rank the value that rank `source` passed in."""
        if self.world_size == 1:
            return value
        box = [value if self.rank == source else None]
        dist.broadcast_object_list(box, src=source, group=self.group)
        return box[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Collective: gives every rank the list of all ranks' values, by rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def sum(self, values: list[float]) -> list[float]:
        """Collective: element-wise sum over ranks, carried in float64."""
        if self.world_size == 1:
            return list(values)
        vector = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(vector, group=self.group)
        return vector.tolist()

    def barrier(self) -> None:
        """Collective: returns when every rank has arrived."""
        if self.world_size > 1:
            dist.barrier(group=self.group)

    def spread(self, files: Sequence[Parcel], place: Callable[[str], Path]) -> dict[str, str]:
        """Collective: see `delivery.spread`; nothing where one rank writes."""
        if len(self.writers) == 1 or not self.writes_here:
            return {}
        return spread(self.rank, self.writer_group, files, place)

    def main_first(self, error: BaseException | None, value: T | None = None) -> T:
        """Collective: every rank gets rank 0's value, or raises rank 0's error.

        Args:
            error: what went wrong on rank 0, None when nothing did; ignored on other ranks.
            value: what rank 0 found; ignored on other ranks.
        """
        error, value = self.share((error, value))
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def on_main(self, work: Callable[[], T], every: float = HEARTBEAT_SECONDS) -> T:
        """Collective: every rank gets what `work` gives on rank 0, or raises its error.

        However long it takes: with peers it runs in a thread, while a short collective every so
        many seconds keeps all ranks inside the time limit of the group.
        """
        if self.world_size == 1:
            return work()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(work) if self.is_main else None
            is_done = False
            while not is_done:
                if future is not None:
                    wait([future], timeout=every)
                is_done = self.share(future is not None and future.done())
            if future is None:
                return self.main_first(None)
            error = future.exception()
            return self.main_first(error, None if error else future.result())

    def writers_first(self, error: BaseException | None, value: T | None = None) -> T:
        """Collective: every rank gets its writer's value, or raises the first writer's error.

        Args:
            error, value: as for `main_first`, of each writer.
        """
        if len(self.writers) == 1:
            return self.main_first(error, value)
        answers = self.gather((error, value) if self.writes_here else (None, None))
        for problem, _ in answers:
            if problem is not None:
                raise problem
        return answers[self.writer_of(self.rank)][1]  # type: ignore[return-value]

    def _new_group(self, members: Sequence[int] | None = None) -> Any:
        limit = timedelta(seconds=self.timeout_seconds)
        return dist.new_group(members, backend="gloo", timeout=limit)

    def _new_writer_group(self) -> Any:
        return self._new_group(self.writers) if len(self.writers) > 1 else None


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step's samples are shared by ranks and micro-batches.

    Micro-batch number m of a global batch holds its samples m * micro_batch up to
    (m + 1) * micro_batch - 1; rank r computes the micro-batches r, r + world_size, ...
    """

    micro_batch: int
    accumulation: int
    world_size: int
    rank: int

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.world_size


def plan_batches(
    ranks: Ranks, *, micro_batch: int, accumulation: int | None, global_batch: int | None
) -> BatchPlan:
    """Gives the batch plan of a launch from two of its three numbers.

    Args:
        micro_batch: `per_device_train_batch_size`, sequences in one forward on one rank.
        accumulation: `gradient_accumulation_steps`; None to follow from `global_batch`, or 1.
        global_batch: `global_batch_size`, sequences in one optimizer step; None to follow.

    Raises:
        ConfigError: the numbers contradict each other or do not divide; it lists what would.
    """
    per_round = micro_batch * ranks.world_size
    if global_batch is None:
        return BatchPlan(micro_batch, accumulation or 1, ranks.world_size, ranks.rank)
    if global_batch % per_round or (accumulation and accumulation * per_round != global_batch):
        share, left = divmod(global_batch, ranks.world_size * (accumulation or 1))
        fitting = [] if left else [share] if accumulation else divisors(share)
        sizes = nearest(fitting, micro_batch) or "none with these other numbers"
        raise ConfigError(
            f"global_batch_size {global_batch} is not per_device_train_batch_size {micro_batch} x "
            f"gradient_accumulation_steps {accumulation or 'any'} x processes {ranks.world_size}",
            expected=f"a multiple of {per_round}; a per_device_train_batch_size that fits: {sizes}",
            where="global_batch_size",
            action=f"set --per_device_train_batch_size to one of these, or --global_batch_size to "
            f"{per_round * max(1, round(Fraction(global_batch, per_round)))}",
        )
    return BatchPlan(micro_batch, global_batch // per_round, ranks.world_size, ranks.rank)
