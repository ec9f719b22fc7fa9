# SPDX-License-Identifier: Apache-2.0
"""What a save and a load cost each rank on 1, 2 and 4 processes, at the same size of the model.

Every process holds the whole state, as in DDP, and writes its share of it; at a load each reads and
verifies all of it. Medians over saves and loads after a first one, over all ranks. All processes
share the processors and the disk of this machine, so wall times grow with their number where those
of separate machines would not: the processor time of a rank is what compares. Then the model of
`mprecipes plan` with the rates of one process beside it, and its table with its own assumptions.

Usage: python -m benchmarks.scale [--size 7m] [--rounds 5] [--dir FOLDER]
"""

import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it, seconds in every process
import torch.distributed as dist

from benchmarks.states import arguments, forget, make_state, working_folder
from mprecipes.checkpoint.manager import CheckpointManager
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.checkpoint.snapshot import live_tensors
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position, SampleOrder
from mprecipes.tools.plan import COLUMNS, Job, Rates, plan, rows_of

WORLDS = (1, 2, 4)
SIZES, RANKS = (1e9, 7e9, 70e9, 400e9), (8, 64, 512, 4096)


def work(rank: int, world_size: int, size: str, rounds: int, home: str) -> None:
    """One process: saves, then loads cold and from the page cache; writes what it measured."""
    torch.set_num_threads(1)
    group = None
    if world_size > 1:
        store = f"file://{home}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        group = dist.group.WORLD
    ranks = Ranks(rank, world_size, rank, world_size, group)
    model, optimizer = make_state(size)
    path = Path(home) / "run"
    run = SimpleNamespace(
        path=path, run_id="0" * 12, checkpoints=path / "checkpoints",
        quarantine=path / "quarantine", milestones=path / "milestones",
    )  # fmt: skip
    found: dict[str, Any] = {"rank": rank, "saves": [], "cold": [], "hot": [], "load_work": []}
    policy = CheckpointPolicy(keep_last=1)
    with CheckpointManager(run, ranks, model, optimizer, policy) as manager:
        for step in range(1, rounds + 2):
            ranks.barrier()
            began, own = time.process_time(), time.thread_time()
            manager.save(Position(step), facts={}, rank_state={})
            own = time.thread_time() - own
            manager.wait()
            used = time.process_time() - began
            (report,) = manager.finished()
            assert report.error is None, report.error
            measured = ("rank_bytes", "blocked_seconds", "seconds")
            values = {name: getattr(report, name) for name in measured}
            found["saves"].append({**values, "stall_work": own, "save_work": used})
        for _ in range(rounds + 1):
            for kind in ("cold", "hot"):
                if kind == "cold" and ranks.is_main:
                    forget(path)
                ranks.barrier()
                began = time.process_time()
                manager.restore_newest(lambda _: None)
                found["load_work"].append(time.process_time() - began)
                found[kind].append(manager.last_load.seconds)  # type: ignore[union-attr]
        found["num_bytes"] = manager.last_load.num_bytes  # type: ignore[union-attr]
    found["state_bytes"] = sum(t.nbytes for t in live_tensors(model, optimizer).values())
    (Path(home) / f"rank-{rank}.json").write_text(json.dumps(found))
    if world_size > 1:
        dist.destroy_process_group()


def measure(world_size: int, size: str, rounds: int, home: Path) -> dict[str, float]:
    """Gives medians over rounds and ranks."""
    home.mkdir()
    context = multiprocessing.get_context("fork")
    arguments_of = [(rank, world_size, size, rounds, str(home)) for rank in range(world_size)]
    processes = [context.Process(target=work, args=each) for each in arguments_of]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a process failed")
    found = [json.loads((home / f"rank-{rank}.json").read_text()) for rank in range(world_size)]
    saves = [save for each in found for save in each["saves"][1:]]
    median = {name: statistics.median(save[name] for save in saves) for name in saves[0]}
    for kind in ("cold", "hot", "load_work"):
        median[kind] = statistics.median(t for each in found for t in each[kind][1:])
    slowest = [max(s["seconds"] for s in per) for per in zip(*(e["saves"][1:] for e in found))]
    return {
        **median,
        "published": statistics.median(slowest),
        "state_bytes": found[0]["state_bytes"],
        "num_bytes": found[0]["num_bytes"],
    }


def order_seconds(global_batch: int = 512) -> float:
    """Seconds per sequence to know the rows of a global batch near the end of 10^9."""
    order, first = SampleOrder(10**9, 1), 10**9 - 10**6
    seconds = []
    for number in range(51):
        began = time.perf_counter()
        order(first + number * global_batch, global_batch)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]) / global_batch


def show(found: dict[int, dict[str, float]], size: str) -> None:
    state = found[1]["state_bytes"]
    print(f"\n{size}: {state / 1e6:.1f} MB of state; medians over saves, loads and ranks\n")
    columns = (
        "processes", "a rank writes", "stall", "published after", "load, cold", "load, hot",
        "processor time: stall", "save", "load",
    )  # fmt: skip
    rows = [
        (
            str(count), f"{each['rank_bytes'] / 1e6:.1f} MB",
            f"{1000 * each['blocked_seconds']:.1f} ms", f"{each['published']:.2f} s",
            f"{each['cold']:.2f} s", f"{each['hot']:.2f} s",
            *(f"{1000 * each[name]:.0f} ms" for name in ("stall_work", "save_work", "load_work")),
        )
        for count, each in found.items()
    ]  # fmt: skip
    print_table(columns, rows)


def compare(found: dict[int, dict[str, float]], order: float) -> None:
    """The model with one process's rates, beside what more of them took; processor time."""
    one = found[1]
    background = one["save_work"] - one["stall_work"]
    rates = Rates(
        copy=one["rank_bytes"] / one["stall_work"], disk=float("inf"), shared=float("inf"),
        read=float("inf"), hash=one["rank_bytes"] / background, start=0.0, commit=0.0, order=order,
    )  # fmt: skip
    loads = replace(rates, hash=one["num_bytes"] / one["load_work"])
    print("\nmodel with one process's rates / measured, processor time of a rank\n")
    rows = []
    for count, each in found.items():
        job = Job(
            one["state_bytes"] / 12, count, ranks_per_node=count, sharded=False, global_batch=1,
        )  # fmt: skip
        pairs = (
            (plan(job, rates).rank_bytes / 1e6, each["rank_bytes"] / 1e6, "MB"),
            (1000 * plan(job, rates).stall, 1000 * each["stall_work"], "ms"),
            (1000 * plan(job, rates).write, 1000 * each["save_work"], "ms"),
            (1000 * plan(job, loads).restart, 1000 * each["load_work"], "ms"),
        )
        cells = [f"{model:.3g} / {real:.3g} {unit}" for model, real, unit in pairs]
        rows.append((str(count), *cells))
    print_table(("processes", "a rank writes", "stall", "save", "load"), rows)
    print(f"\ndata order: {1e6 * order:.2f} us a sequence")


def print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def main() -> None:
    given = arguments(__doc__)
    size = given.size[0]
    found: dict[int, dict[str, float]] = {}
    with working_folder(given) as home:
        for count in WORLDS:
            found[count] = measure(count, size, given.rounds, Path(home) / str(count))
            print(f"{count} measured", flush=True)
    show(found, size)
    compare(found, order_seconds())
    print("\nthe model's table, sharded, rates as assumed in mprecipes/tools/plan.py\n")
    print_table(COLUMNS, rows_of([plan(Job(size, ranks)) for size in SIZES for ranks in RANKS]))


if __name__ == "__main__":
    main()
