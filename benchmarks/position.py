# SPDX-License-Identifier: Apache-2.0
"""What restoring a position in the data costs: at the start, deep inside, and beside its peers.

    python -m benchmarks.position

Two questions. How long until the rows of one global batch (512) are known, at sample 10 and at the
end of 10^9 samples? How long until the first micro-batch of 8 rows is there, from a real packed
file? Peers in the same run: `numpy` permutation and `accelerate.skip_first_batches`, both over 10^7
rows. Each figure is a median; exits 1 if a position among 10^9 takes 5 ms or more.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from accelerate import skip_first_batches
from torch.utils.data import DataLoader

from mprecipes.compute.ranks import BatchPlan, Ranks
from mprecipes.data.order import SampleOrder, micro_batches
from mprecipes.data.packing import PackedData, prepare_data

MANY, PEER_ROWS, GLOBAL_BATCH, LIMIT_MS = 10**9, 10**7, 512, 5.0


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Gives the median wall time of `work` in milliseconds after one call for warming up."""
    work()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def rows_at(first: int) -> np.ndarray:
    return SampleOrder(MANY, seed=0)(first, GLOBAL_BATCH)


def first_micro_batch(data: PackedData, start: int) -> object:
    batches = micro_batches(data, SampleOrder(len(data), 0), BatchPlan(8, 1, 1, 0), start=start)
    return next(batches)


def permuted_rows(first: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(PEER_ROWS)[first : first + GLOBAL_BATCH]


def first_batch_after_skip(num_batches: int) -> object:
    loader = DataLoader(range(PEER_ROWS), batch_size=8, shuffle=True)
    return next(iter(skip_first_batches(loader, num_batches) if num_batches else loader))


def packed_rows(folder: Path) -> PackedData:
    source = folder / "rows.jsonl"
    with source.open("w") as file:
        for row in range(100_000):
            file.write(json.dumps({"text": f"{row:0255}"}) + "\n")
    return prepare_data(
        source=str(source), seq_length=256, ranks=Ranks(), cache_dir=folder / "cache"
    ).train


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = packed_rows(Path(folder))
        deep = 1000 * len(data) - 8
        ours = [
            (f"rows of a global batch at sample 10 of {MANY:.0e}", lambda: rows_at(10), 101),
            ("  at its last 512 samples", lambda: rows_at(MANY - GLOBAL_BATCH), 101),
            ("first micro-batch of a packed file, start", lambda: first_micro_batch(data, 0), 51),
            ("  end of epoch 999", lambda: first_micro_batch(data, deep), 51),
        ]
        last = PEER_ROWS // 8 - 1
        peers = [
            (f"numpy permutation of {PEER_ROWS:.0e}, any place", lambda: permuted_rows(10), 3),
            (
                f"DataLoader(shuffle) over {PEER_ROWS:.0e}, start",
                lambda: first_batch_after_skip(0),
                3,
            ),
            ("  accelerate.skip_first_batches, half", lambda: first_batch_after_skip(last // 2), 3),
            ("  accelerate.skip_first_batches, end", lambda: first_batch_after_skip(last), 3),
        ]
        figures = []
        for name, work, repeats in itertools.chain(ours, peers):
            figures.append(median_ms(work, repeats))
            print(f"{name:<52} {figures[-1]:12.3f} ms", flush=True)
    if max(figures[:2]) >= LIMIT_MS:
        sys.exit(f"a position took {max(figures[:2]):.3f} ms, the limit is {LIMIT_MS} ms")


if __name__ == "__main__":
    main()
