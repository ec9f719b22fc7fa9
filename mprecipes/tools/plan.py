# SPDX-License-Identifier: Apache-2.0
"""`mprecipes plan`: what checkpoints will cost before the cluster is booked; arithmetic, no torch.

A model on paper of what this repository does: each rank copies its share of the state to host
memory (training stands still), writes and hashes it beside the training, and rank 0 publishes; at a
restart each rank reads and verifies what it needs. Rates are assumptions until they are measured
where the run will be: `benchmarks/scale.py` and `benchmarks/save.py` measure them.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from mprecipes.errors import ConfigError
from mprecipes.tools.console import print_json

STATE_BYTES = 12  # a parameter: FP32 master and the two FP32 moments of AdamW
WINDOW_BYTES = 16 << 20  # of a replicated state, compared over the ranks at each save
GB = 1e9
HOURS_PER_FAILURE = 50_000.0
"""Hours until one accelerator takes its job down, on average.

Source: Llama 3 (arXiv 2407.21783), section 3.3.4: 419 unexpected interruptions of 16,384 GPUs in 54
days, which is one per 50,700 GPU hours.
"""


@dataclass(frozen=True)
class Rates:
    """How fast things are; bytes and seconds.

    Attributes:
        copy: of one rank, from the device to page-locked host memory.
        disk: of one node, writing its own ranks' shares.
        shared: of the whole storage system, over all nodes; infinite for node-local disks.
        read: of one node.
        hash: SHA-256 of one rank, two threads.
        start: seconds from the launch to the first read: scheduler, imports, process groups.
        commit: seconds of a save that do not depend on its size, per rank and at least.
        order: seconds per sequence of a global batch to know its rows.
        hours_per_failure: until one accelerator takes its job down, on average.
    """

    copy: float = 20 * GB
    disk: float = 2 * GB
    shared: float = 200 * GB
    read: float = 4 * GB
    hash: float = 3.5 * GB
    start: float = 120.0
    commit: float = 0.001
    order: float = 0.65e-6
    hours_per_failure: float = HOURS_PER_FAILURE


@dataclass(frozen=True)
class Job:
    """What is trained, on how much.

    Attributes:
        sharded: each rank holds its share of the state only (FSDP2, ZeRO-3); otherwise every rank
            holds all of it, and still writes its share only.
        largest: parameters of the largest tensor, which a rank writes whole when not sharded.
        kept: checkpoints and milestones on the disk at the same time.
        step_seconds: of one optimizer step.
    """

    parameters: float
    ranks: int
    ranks_per_node: int = 8
    sharded: bool = True
    largest: float = 0.0
    kept: int = 4
    global_batch: int = 1024
    step_seconds: float = 10.0


@dataclass(frozen=True)
class Plan:
    """What follows. Times are seconds, sizes bytes.

    Attributes:
        stall: the training stands still for one save.
        write: from the copy until the checkpoint is published.
        restart: from a failure until the first new step.
        interval: between saves, recommended.
        lost: share of the machine's time that saves, restarts and repeated steps take then.
        data_order: to find the rows of a global batch, at any position; part of every step.
        disk: of all that is kept, and one being written.
    """

    ranks: int
    parameters: float
    state: float
    rank_bytes: float
    stall: float
    write: float
    restart: float
    mean_time_between_failures: float
    interval: float
    interval_steps: int
    lost: float
    data_order: float
    disk: float


def plan(job: Job, rates: Rates | None = None) -> Plan:
    """Gives what checkpoints of a job cost.

    Raises:
        ConfigError: a number is not positive, or not finite; `shared` alone may be infinite. Or a
            result is beyond all numbers.
    """
    rates = rates or Rates()
    _check(job, rates)
    state = job.parameters * STATE_BYTES
    share = state / job.ranks
    if not job.sharded:
        share = max(
            share, job.largest * STATE_BYTES / 3
        )  # master and moments are tensors of their own
    nodes = math.ceil(job.ranks / job.ranks_per_node)
    on_node = min(job.ranks, job.ranks_per_node)
    window = 0 if job.sharded or job.ranks == 1 else min(WINDOW_BYTES, state)
    stall = (share + window) / rates.copy
    commit = rates.commit * job.ranks
    write = stall + commit + max(
        share * on_node / rates.disk, state / rates.shared, (share + window) / rates.hash
    )  # fmt: skip
    needed = share if job.sharded else state  # by one rank
    from_storage = state if job.sharded else state * nodes  # a node's ranks share its page cache
    on_disk = share * on_node if job.sharded else state
    read = max(on_disk / rates.read, from_storage / rates.shared, needed / rates.hash)
    order = job.global_batch * rates.order
    restart = rates.start + commit + read + order
    mean_time = rates.hours_per_failure * 3600 / job.ranks
    interval = max(best_interval(stall, mean_time), write, job.step_seconds)
    if not math.isfinite(interval / job.step_seconds):
        raise ConfigError(
            f"a save of {state:g} bytes that takes {write:g} s",
            expected="sizes, rates and times of a real machine",
            where="--parameters, --step_seconds and the rates",
            action="correct the one that is out of range",
        )
    lost = stall / interval + (interval / 2 + write + restart) / mean_time
    return Plan(
        ranks=job.ranks,
        parameters=job.parameters,
        state=state,
        rank_bytes=share,
        stall=stall,
        write=write,
        restart=restart,
        mean_time_between_failures=mean_time,
        interval=interval,
        interval_steps=max(1, round(interval / job.step_seconds)),
        lost=min(1.0, lost),
        data_order=order,
        disk=state * (job.kept + 1),
    )


def best_interval(cost: float, mean_time: float) -> float:
    """Gives the seconds of training between saves that lose least time in all.

    Args:
        cost: the training stands still for a save.
        mean_time: between failures.

    Source: Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
    Future Generation Computer Systems 22 (2006); its first term is Young, A first order
    approximation to the optimum checkpoint interval, CACM 17 (1974).
    """
    if cost >= 2 * mean_time:
        return mean_time
    ratio = cost / (2 * mean_time)
    return math.sqrt(2 * cost * mean_time) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def _check(job: Job, rates: Rates) -> None:
    may_be_zero = {"largest", "commit", "order", "start"}
    for name, value in {**asdict(job), **asdict(rates)}.items():
        is_usable = value > 0 or (value == 0 and name in may_be_zero)
        is_usable &= math.isfinite(value) or (name == "shared" and value == math.inf)
        if not isinstance(value, bool) and not is_usable:
            raise ConfigError(
                f"{name} {value:g}",
                expected="a number above 0" if value <= 0 else "a finite number above 0",
                where=f"--{name}",
                action=f"give --{name} a number above 0",
            )


def rows_of(plans: Sequence[Plan]) -> list[tuple[str, ...]]:
    """Gives one line of a table per plan, as text."""
    return [
        (
            f"{each.parameters / 1e9:g} B", f"{each.ranks:,}", _bytes(each.state),
            _bytes(each.rank_bytes), _seconds(each.stall), _seconds(each.write),
            _seconds(each.restart), _seconds(each.interval), f"{each.interval_steps:,}",
            f"{100 * each.lost:.2f} %", _seconds(each.data_order), _bytes(each.disk),
        )
        for each in plans
    ]  # fmt: skip


COLUMNS = (
    "parameters", "ranks", "state", "a rank writes", "stall", "published after", "restart",
    "save every", "steps", "time lost", "data order", "disk",
)  # fmt: skip


def plan_command(
    parameters: Annotated[
        list[float], typer.Option("--parameters", help="Of the model, as 7e9; again for more rows.")
    ],
    ranks: Annotated[list[int], typer.Option("--ranks", help="Processes; again for more rows.")],
    ranks_per_node: Annotated[int, typer.Option("--ranks_per_node")] = 8,
    replicated: Annotated[
        bool, typer.Option("--replicated", help="DDP: every rank holds the whole state.")
    ] = False,
    largest: Annotated[
        float, typer.Option("--largest", help="Parameters of the largest tensor, with --replicated")
    ] = 0.0,
    kept: Annotated[int, typer.Option("--kept", help="Checkpoints and milestones kept.")] = 4,
    global_batch: Annotated[int, typer.Option("--global_batch", help="Sequences a step.")] = 1024,
    step_seconds: Annotated[float, typer.Option("--step_seconds", help="Of one step.")] = 10.0,
    copy_rate: Annotated[float, typer.Option("--copy", help="GB/s of a rank to the host.")] = 20.0,
    disk_rate: Annotated[float, typer.Option("--disk", help="GB/s a node writes.")] = 2.0,
    shared_rate: Annotated[
        float, typer.Option("--shared", help="GB/s of the whole storage; inf: node-local disks.")
    ] = 200.0,
    read_rate: Annotated[float, typer.Option("--read", help="GB/s a node reads.")] = 4.0,
    hash_rate: Annotated[float, typer.Option("--hash", help="GB/s of SHA-256 of a rank.")] = 3.5,
    start: Annotated[float, typer.Option("--start", help="Seconds to the first read.")] = 120.0,
    hours_per_failure: Annotated[
        float, typer.Option("--hours_per_failure", help="Of one accelerator.")
    ] = HOURS_PER_FAILURE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say what checkpoints will cost: bytes, stall, restart, how often to save, disk space.

    A model on paper. Its rates are assumptions; put in your own, docs/scale.md says how to measure.
    """
    rates = Rates(
        copy=copy_rate * GB, disk=disk_rate * GB, shared=shared_rate * GB, read=read_rate * GB,
        hash=hash_rate * GB, start=start, hours_per_failure=hours_per_failure,
    )  # fmt: skip
    job = Job(
        1.0, 1, ranks_per_node=ranks_per_node, sharded=not replicated, largest=largest, kept=kept,
        global_batch=global_batch, step_seconds=step_seconds,
    )  # fmt: skip
    plans = [
        plan(replace(job, parameters=size, ranks=count), rates)
        for size in parameters
        for count in ranks
    ]
    if as_json:
        facts: dict[str, Any] = {"rates": asdict(rates), "plans": [asdict(each) for each in plans]}
        return print_json(facts)
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for row in rows_of(plans):
        print("| " + " | ".join(row) + " |")


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 1000 or unit == "PB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
