# SPDX-License-Identifier: Apache-2.0
"""Whether the processes can talk: collectives with known answers under a time limit, and counters.

A collective that hangs raises nothing by itself for minutes; here every rank that waits gives up
after a limit of its own and can say so. Counters of the network are those of the whole machine.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mprecipes.compute.ranks import Ranks

ELEMENTS = 1 << 16
RETRANSMITTED_SHARE, RETRANSMITTED_LEAST = 0.01, 100
_POLL_SECONDS = 0.0005
_IB_ERRORS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors",
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What one collective gave on one rank.

    Attributes:
        problem: what was wrong with it; None when the answer was right and in time.
        hangs: there was no answer: the others cannot be asked either.
    """

    name: str
    seconds: float
    problem: str | None = None
    hangs: bool = False


def try_collectives(ranks: Ranks, device: torch.device, limit_seconds: float) -> list[Answer]:
    """Collective: an all-reduce, an all-gather and a broadcast whose answers are known.

    On the backend that the training uses. Each is done twice and the second is timed, since the
    first one connects. Ends within about `limit_seconds` on a rank whose peers do not answer; what
    comes after the first failure is left out. [] with one process.
    """
    if ranks.world_size == 1:
        return []
    answers: list[Answer] = []
    # gloo gives up at the limit of its group, and its end waits for what is under way; NCCL ends
    # the process at such a limit, so there the group of the training is used and watched.
    own = dist.get_backend() == "gloo"
    group: Any = None
    for name, attempt in (("all_reduce", _reduce), ("all_gather", _gather), ("broadcast", _cast)):
        began = time.monotonic()
        try:
            if own and group is None:
                group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_seconds))
            for _ in range(2):
                began = time.monotonic()
                problem = attempt(ranks, device, group, limit_seconds)
            answers.append(Answer(name, time.monotonic() - began, problem))
        except RuntimeError as error:  # DistBackendError and timeouts are of this kind
            seconds = time.monotonic() - began
            problem = f"no answer after {seconds:.1f} s ({_first_line(error)})"
            answers.append(Answer(name, seconds, problem, hangs=True))
        if problem is not None:
            break
    return answers


def _reduce(ranks: Ranks, device: torch.device, group: Any, limit: float) -> str | None:
    """Numbers whose sum is exact in FP32 and in no 16-bit format."""
    tensor = torch.full((ELEMENTS,), 1.0 + 2.0**-16, device=device) * float(ranks.rank + 1)
    _wait(dist.all_reduce(tensor, group=group, async_op=True), limit)
    total = ranks.world_size * (ranks.world_size + 1) / 2
    return _wrong(tensor, torch.tensor(total, dtype=torch.float64) * (1.0 + 2.0**-16))


def _gather(ranks: Ranks, device: torch.device, group: Any, limit: float) -> str | None:
    mine = torch.full((ELEMENTS // 16,), 1000.0 + ranks.rank, device=device)
    found = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    _wait(dist.all_gather(found, mine, group=group, async_op=True), limit)
    problems = [
        f"from rank {rank} {problem}"
        for rank, part in enumerate(found)
        if (problem := _wrong(part, torch.tensor(1000.0 + rank)))
    ]
    return "; ".join(problems) or None


def _cast(ranks: Ranks, device: torch.device, group: Any, limit: float) -> str | None:
    tensor = torch.full((ELEMENTS // 16,), 7.0 if ranks.is_main else 0.0, device=device)
    _wait(dist.broadcast(tensor, src=0, group=group, async_op=True), limit)
    return _wrong(tensor, torch.tensor(7.0))


def _wrong(tensor: torch.Tensor, expected: torch.Tensor) -> str | None:
    wanted = expected.to(torch.float32).item()
    low, high = tensor.min().item(), tensor.max().item()
    return None if low == high == wanted else f"gave {low!r} to {high!r}, not {wanted!r}"


def _wait(work: Any, limit: float) -> None:
    deadline = time.monotonic() + limit
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError("still under way")
        time.sleep(_POLL_SECONDS)
    work.wait()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:160]


def network_counters(
    snmp: Path = Path("/proc/net/snmp"), infiniband: Path = Path("/sys/class/infiniband")
) -> dict[str, int]:
    """Gives TCP segments sent and sent again, and InfiniBand errors by port; {} if unreadable."""
    counters: dict[str, int] = {}
    try:
        lines = [line.split() for line in snmp.read_text("ascii").splitlines()]
    except (OSError, ValueError):
        lines = []
    tcp = [line[1:] for line in lines if line and line[0] == "Tcp:"]
    if len(tcp) == 2:
        values = dict(zip(*tcp))
        counters |= {
            name: int(values[key])
            for name, key in (("tcp_sent", "OutSegs"), ("tcp_retransmitted", "RetransSegs"))
            if values.get(key, "").isdigit()
        }
    for name in _IB_ERRORS:
        for path in sorted(infiniband.glob(f"*/ports/*/counters/{name}")):
            try:
                value = int(path.read_text("ascii"))
            except (OSError, ValueError):
                continue
            counters[f"{path.parts[-5]}/{path.parts[-3]} {name}"] = value
    return counters


def network_problems(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Gives what went wrong on this machine's network between two readings.

    More than 1 % of the TCP segments sent again, and at least 100; any InfiniBand error.
    """
    risen = {name: after[name] - before[name] for name in before if name in after}
    again, sent = risen.pop("tcp_retransmitted", 0), risen.pop("tcp_sent", 0)
    found = []
    if again >= RETRANSMITTED_LEAST and again > RETRANSMITTED_SHARE * max(1, sent):
        found.append(f"{again} of {sent} TCP segments were sent again")
    return found + [f"{name} rose by {value}" for name, value in risen.items() if value > 0]
