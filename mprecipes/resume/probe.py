# SPDX-License-Identifier: Apache-2.0
"""The probe: a forward and backward that a save makes and a resume repeats, thrown away both times.

Its batch is of the step before the save: the first micro-batch of every rank. It was just trained,
so it fits in memory and is finite, and no probe can cost a save; a resume needs no data of its own.
Random streams and buffers are put back, gradients are dropped: the training does not notice (tested
bit for bit).

In a manifest, `probe`: `first_sample`, `micro_batch`, `num_micro_batches`, `batch_digest`,
`targets`, `loss` and `grad_norm` (hexadecimal floats), `grad_digest`, `sketch` (a linear sketch of
the gradient, 64 numbers), `matmul_bits`, and by rank `forward_seconds` and `random`, a digest of
its random streams.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from mprecipes.checkpoint.digests import digests_of_parts
from mprecipes.checkpoint.modules import is_sharded
from mprecipes.checkpoint.snapshot import gradient_parts
from mprecipes.compute.mix import mix64
from mprecipes.compute.numerics import batch_digest
from mprecipes.compute.randomness import kept_random_state, random_state_digest
from mprecipes.compute.ranks import BatchPlan, Ranks
from mprecipes.data.order import IGNORED_LABEL, MicroBatch, Position, SampleOrder, micro_batches

SKETCH = 64
_CHUNK_ROWS = 1 << 16


class Part(NamedTuple):
    """A gradient, or this rank's part of one.

    Attributes:
        offset: index, in the whole parameter, of the part's first element.
    """

    name: str
    tensor: torch.Tensor
    offset: int = 0


Gradients = Callable[[torch.nn.Module], Iterable[Part]]


class Launch(Protocol):
    """What is used of `compute.launch.Launch`."""

    @property
    def accelerator(self) -> Any: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def plan(self) -> BatchPlan: ...
    @property
    def device(self) -> torch.device: ...


def held_gradients(model: torch.nn.Module) -> Iterator[Part]:
    """Gives what this rank holds of every gradient: all of it, or its shard."""
    yield from (Part(*each) for each in gradient_parts(model))


@dataclass(frozen=True)
class Probed:
    """What one probe gave, the same on every rank.

    Attributes:
        facts: a manifest's `probe`.
        grad_digests: of each rank's whole gradient; empty where no rank holds it in full.
        seconds: the whole probe took on this rank.
    """

    facts: dict[str, Any]
    grad_digests: list[str]
    seconds: float


class Probe:
    """One probe; a recipe drives it, `probe.batches()` through forward and backward.

    Args:
        data: the training data.
        position: of the save; a new probe's batch is of the step before it.
        stored: a manifest's `probe`, to make the same one again; None makes a new one.
        gradients: gives what this rank holds of the gradient after the backward.
        is_whole: whether that is the whole gradient, the same on every rank; None looks at the
            model.
    """

    def __init__(
        self,
        launch: Launch,
        data: Any,
        order: SampleOrder,
        position: Position,
        stored: dict[str, Any] | None = None,
        *,
        gradients: Gradients = held_gradients,
        is_whole: bool | None = None,
    ) -> None:
        self._launch, self._data = launch, data
        self._order = replace(order, skipped=position.skipped)
        self._gradients, self._is_whole = gradients, is_whole
        plan, stored = launch.plan, stored or {}
        self._first = stored.get("first_sample", max(0, position.samples_seen - plan.global_batch))
        self._size = stored.get("micro_batch", plan.micro_batch)
        self._count = stored.get("num_micro_batches", plan.world_size)
        self._plan = replace(
            plan, micro_batch=self._size, accumulation=-(-self._count // plan.world_size)
        )
        self._targets = data.num_targets(self._order(self._first, self._size * self._count))
        self._losses: list[tuple[int, torch.Tensor]] = []
        self._digest, self._forward, self._began = 0, 0.0, 0.0

    @property
    def scale(self) -> float:
        """What a micro-batch's summed loss is multiplied with, as in the training step."""
        plan = self._launch.plan
        return plan.accumulation * plan.world_size / max(1, self._targets)

    @contextmanager
    def measuring(self, model: torch.nn.Module) -> Iterator["Probe"]:
        """Puts random streams and buffers back at the end."""
        self._started, self._random = time.perf_counter(), random_state_digest()
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        with kept_random_state(self._launch.device):
            yield self
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def batches(self) -> Iterator[MicroBatch]:
        """Gives this rank's micro-batches; where the ranks do not divide them, one without targets.

        Collective in effect: every rank gets equally many.
        """
        device = self._launch.device
        read = micro_batches(self._data, self._order, self._plan, start=self._first)
        last = self._plan.accumulation - 1
        for turn in range(self._plan.accumulation):
            self._launch.accelerator.sync_gradients = turn == last  # ZeRO adds up until then
            batch = next(read).to(device)
            number = (batch.first_sample - self._first) // self._size
            if number >= self._count:
                labels = torch.full_like(batch.tensors["labels"], IGNORED_LABEL)
                batch = replace(batch, tensors={**batch.tensors, "labels": labels})
            else:
                self._digest += int(batch_digest(batch.tensors).item())
            self._number, self._began = number, self._now()
            yield batch
        read.close()

    def add(self, loss_sum: torch.Tensor) -> None:
        """Notes the loss of the micro-batch, between its forward and its backward."""
        self._forward += self._now() - self._began
        if self._number < self._count:
            self._losses.append((self._number, loss_sum.detach()))

    def result(self, model: torch.nn.Module) -> Probed:
        """Collective: gives what was measured; call it before the gradients are dropped."""
        scaler = getattr(self._launch.accelerator, "scaler", None)
        inverse = 1.0 / scaler.get_scale() if scaler is not None else 1.0
        is_whole = not is_sharded(model) if self._is_whole is None else self._is_whole
        parts = list(self._gradients(model))
        if inverse != 1.0:
            parts = [part._replace(tensor=part.tensor * inverse) for part in parts]
        squares, sketch = sketch_gradient(parts)
        digest = int(
            digests_of_parts(("g", t, name, at) for name, t, at in parts).get("g", "0"), 16
        )
        mine: dict[str, Any] = {
            "losses": [(number, loss.item()) for number, loss in self._losses],
            "batch": self._digest,
            "digest": digest,
            "squares": squares,
            "sketch": sketch,
            "seconds": self._forward,
            "random": self._random,
        }
        found = self._launch.ranks.gather(mine)
        if not is_whole:
            squares = math.fsum(each["squares"] for each in found)
            sketch = [math.fsum(column) for column in zip(*(each["sketch"] for each in found))]
            digest = sum(each["digest"] for each in found) % (1 << 64)
        losses = [loss for _, loss in sorted(pair for each in found for pair in each["losses"])]
        facts = {
            "first_sample": self._first,
            "micro_batch": self._size,
            "num_micro_batches": self._count,
            "batch_digest": f"{sum(each['batch'] for each in found) % (1 << 64):016x}",
            "targets": self._targets,
            "loss": (_sum(losses) / max(1, self._targets)).hex(),
            "grad_norm": (math.sqrt(squares) if math.isfinite(squares) else math.inf).hex(),
            "grad_digest": f"{digest:016x}",
            "sketch": [value if math.isfinite(value) else 0.0 for value in sketch],
            "matmul_bits": matmul_bits(self._launch.device),
            "forward_seconds": [round(each["seconds"], 6) for each in found],
            "random": [each["random"] for each in found],
        }
        each_rank = [f"{each['digest']:016x}" for each in found] if is_whole else []
        return Probed(facts, each_rank, time.perf_counter() - self._started)

    def _now(self) -> float:
        if self._launch.device.type == "cuda":
            torch.cuda.synchronize(self._launch.device)
        return time.perf_counter()


def sketch_gradient(parts: Iterable[Part]) -> tuple[float, list[float]]:
    """Gives the sum of squares and a linear sketch of a gradient, or of a part of one.

    Element i of a parameter goes to column i modulo 64 with a sign keyed by i // 64 and the name:
    sketches of parts add up, and the cosine of two sketches is close to that of the gradients when
    they are alike (a relative error of the gradient is seen within about 10 %).
    Source: Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", 2002.
    """
    squares, columns = 0.0, torch.zeros(SKETCH, dtype=torch.float64)
    for name, tensor, offset in parts:
        flat = tensor.detach().reshape(-1)
        norm = torch.linalg.vector_norm(flat.float(), dtype=torch.float64).item()
        squares += norm * norm
        key = sum(byte * 257**place for place, byte in enumerate(name.encode())) % (1 << 62)
        before = offset % SKETCH
        rows = -(-(before + flat.numel()) // SKETCH)
        padded = torch.zeros(rows * SKETCH, dtype=torch.float32, device=flat.device)
        padded[before : before + flat.numel()] = flat
        table = padded.view(rows, SKETCH)
        for start in range(0, rows, _CHUNK_ROWS):
            chunk = table[start : start + _CHUNK_ROWS]
            first = offset // SKETCH + start
            numbers = torch.arange(first, first + len(chunk), device=flat.device) + key
            signs = (mix64(numbers) & 1).to(torch.float32) * 2 - 1
            columns += (chunk * signs[:, None]).sum(dim=0, dtype=torch.float64).cpu()
    return squares, columns.tolist()


def cosine(a: Iterable[float], b: Iterable[float]) -> float:
    """Gives the cosine of the angle between two sketches; 0 where one of them is zero."""
    left, right = list(a), list(b)
    if left == right:
        return 1.0
    size = math.sqrt(math.fsum(x * x for x in left)) * math.sqrt(math.fsum(x * x for x in right))
    return math.fsum(x * y for x, y in zip(left, right)) / size if size > 0 else 0.0


def matmul_bits(device: torch.device) -> int:
    """Measures how many bits of the mantissa a product of FP32 matrices keeps, outside autocast.

    23 in FP32, 10 in TF32, 7 in BF16; a large enough product that the fast paths are taken.
    """
    size = 256
    bits = torch.arange(size, device=device) % 23 + 1
    values = torch.diag(1.0 + torch.exp2(-bits.float()))
    with torch.autocast(device.type, enabled=False):
        product = values @ torch.eye(size, device=device)
    kept = bits[(product.diagonal() != 1.0) & (product.diagonal() == values.diagonal())]
    return int(kept.max()) if len(kept) else 0


def _sum(losses: list[float]) -> float:
    """Sums in a fixed order; `fsum` refuses infinities of both signs."""
    return math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan
