# SPDX-License-Identifier: Apache-2.0
"""What guarding a run costs: the judgements of every step, and a comparison of the replicas.

    python -m benchmarks.guards

Judgements: one update through spike guard and alerts with full windows, median of 2000 updates.
Replicas: two processes with equal weights of 50 M parameters (200 MB) on gloo, median of five
comparisons, beside one pass that only reads the bytes (a sum), in the same run. Exits 1 if
a judgement costs 1 ms or more.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mprecipes.checkpoint.replicas import compare_weights
from mprecipes.compute.ranks import Ranks
from mprecipes.observe.alerts import Alerts
from mprecipes.observe.policy import WatchPolicy
from mprecipes.resume.spikes import SpikeDetector

LIMIT_MS, NUM_TENSORS, ELEMENTS = 1.0, 50, 1_000_000


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Gives the median wall time of `work` in milliseconds after one call for warming up."""
    work()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def judgement_ms() -> float:
    policy, draw = WatchPolicy(), random.Random(0)
    spikes, alerts = SpikeDetector(128, 6.0, 3), Alerts(policy)

    def judge() -> None:
        loss, norm = 2 + draw.gauss(0, 0.1), math.exp(draw.gauss(0, 0.2))
        spikes.judge(1, 1, loss, norm)
        alerts.judge(loss, norm)

    for _ in range(2000):
        judge()
    return median_ms(judge, 2000)


def replicas(rank: int, store: str, found: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ranks = Ranks(rank, 2, rank, 2, dist.group.WORLD)
    generator = torch.Generator().manual_seed(0)
    live = {f"weights/{n}": torch.randn(ELEMENTS, generator=generator) for n in range(NUM_TENSORS)}
    compare = median_ms(lambda: compare_weights(live, ranks, 1), 5)
    read = median_ms(lambda: [tensor.sum() for tensor in live.values()], 5)
    if rank == 0:
        Path(found).write_text(json.dumps({"compare_ms": compare, "read_ms": read}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    figures = {"judgement_ms": judgement_ms()}
    with tempfile.TemporaryDirectory() as folder:
        found = str(Path(folder) / "found.json")
        mp.spawn(replicas, (str(Path(folder) / "store"), found), nprocs=2)
        figures |= json.loads(Path(found).read_text())
    figures["compare_gb_per_second"] = 4e-6 * NUM_TENSORS * ELEMENTS / figures["compare_ms"]
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
    return int(figures["judgement_ms"] >= LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
