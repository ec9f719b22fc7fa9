# SPDX-License-Identifier: Apache-2.0
"""What a verified load costs, beside unverified ones and beside a hash before the load.

All read the state of a Llama with AdamW into the same live tensors, take turns, cold (just before,
the kernel was made to read and then to forget the files) and hot (page cache); medians over rounds
after a first one, ratios are medians of the ratios within a round. What is predicted is what the
product logs at every resume: bytes / the bandwidth measured on the first sixteenth of them.

Usage: python -m benchmarks.load [--size 150m] [--size 23m] [--rounds 5] [--dir FOLDER]
"""

import hashlib
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from benchmarks.states import Table, arguments, check, forget, make_state, working_folder
from mprecipes.checkpoint.headers import read_headers
from mprecipes.checkpoint.loading import LoadReport, load
from mprecipes.checkpoint.snapshot import HostBuffers, live_tensors
from mprecipes.checkpoint.storage import put
from mprecipes.identity.files import sha256_file


class Bench:
    """One state on disk in each format, and the tensors it is loaded into."""

    def __init__(self, size: str, folder: Path) -> None:
        model, optimizer = make_state(size)
        self.live = live_tensors(model, optimizer)
        self.num_bytes = sum(tensor.nbytes for tensor in self.live.values())
        self.folder = folder / "ours"
        self.folder.mkdir()
        copies = HostBuffers().copy(self.live)
        self.entries = put(copies, self.folder, rank=0, world_size=1)
        self.data = [
            memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            for tensor in copies.values()
        ]
        torch.save(copies, folder / "torch.pt")
        dcp.save(dict(copies), checkpoint_id=folder / "dcp")
        self.home = folder
        self.reports: list[LoadReport] = []

    def mprecipes(self) -> None:
        headers = read_headers(self.folder, self.entries)
        self.reports.append(load(self.folder, self.entries, headers, self.live))

    def safetensors(self) -> None:
        for entry in self.entries:
            with safe_open(self.folder / entry.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    self.live[name].copy_(file.get_tensor(name))

    def hash_then_load(self) -> None:
        for entry in self.entries:
            assert sha256_file(self.folder / entry.path) == entry.sha256
        self.safetensors()

    def torch_load(self) -> None:
        stored = torch.load(self.home / "torch.pt", mmap=True, weights_only=True)
        for name, tensor in stored.items():
            self.live[name].copy_(tensor)

    def dcp_load(self) -> None:
        dcp.load(dict(self.live), checkpoint_id=self.home / "dcp")

    def hash_floor(self) -> None:
        """Two threads over the bytes in memory, nothing read."""
        halves = (self.data[0::2], self.data[1::2])

        def work(parts: list[memoryview]) -> str:
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part)
            return digest.hexdigest()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, halves))

    def engines(self) -> dict[str, tuple[Callable[[], None], Path]]:
        """What is measured, and where it reads."""
        return {
            "SHA-256 in two threads (floor)": (self.hash_floor, self.folder),
            "mprecipes, verified": (self.mprecipes, self.folder),
            "safetensors, unverified": (self.safetensors, self.folder),
            "SHA-256, then safetensors": (self.hash_then_load, self.folder),
            "torch.load(mmap=True)": (self.torch_load, self.home / "torch.pt"),
            "dcp.load": (self.dcp_load, self.home / "dcp"),
        }


def measure(size: str, rounds: int, folder: Path) -> None:
    bench, table = Bench(size, folder), Table()
    floor, ours, plain, *_ = bench.engines()
    for _ in range(rounds + 1):
        for name, (engine, place) in bench.engines().items():
            if name != floor:
                forget(place)
                table.add(name, cold=timed(engine))
            engine()  # what is hot has been read just before
            table.add(name, hot=timed(engine))
    table.drop_first()
    table.show(f"{size}: one load", ["cold", "hot"], bench.num_bytes)
    cold = bench.reports[3::3]  # of the three loads of a round the first, without the first round
    predicted = statistics.median(report.predicted_seconds for report in cold)
    measured = statistics.median(report.seconds for report in cold)
    print(f"  cold load: predicted {predicted:.3f} s, measured {measured:.3f} s")
    check("cold / unverified", table.paired((ours, "cold"), (plain, "cold")), 1.1)
    check("hot / SHA-256 in two threads", table.paired((ours, "hot"), (floor, "hot")), 1.4)


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    given = arguments(__doc__)
    with working_folder(given) as home:
        store = f"file://{home}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        for size in given.size:
            folder = Path(home) / size
            folder.mkdir()
            measure(size, given.rounds, folder)
            shutil.rmtree(folder)
            os.sync()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
