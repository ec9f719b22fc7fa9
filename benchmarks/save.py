# SPDX-License-Identifier: Apache-2.0
"""What a save costs, beside what else saves the same state and beside the physical floors.

All engines take turns in this one process, a Llama with AdamW, medians over rounds after a first
one; ratios are medians of the ratios within a round, since machines drift. Blocked: the training
thread stood still. Total: until everything was on the disk (the peers do not all sync).

Usage: python -m benchmarks.save [--size 150m] [--size 23m] [--rounds 5] [--dir FOLDER]
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.states import Engine, Table, arguments, check, make_state, working_folder
from mprecipes.checkpoint.manager import CheckpointManager
from mprecipes.checkpoint.policy import CheckpointPolicy
from mprecipes.checkpoint.snapshot import live_tensors
from mprecipes.compute.ranks import Ranks
from mprecipes.data.order import Position

CHUNK = 16 << 20


class Bench:
    """The engines over one state; each call makes one save and gives its seconds."""

    def __init__(self, size: str, folder: Path) -> None:
        self.model, self.optimizer = make_state(size)
        self.folder = folder
        self.live = live_tensors(self.model, self.optimizer)
        self.num_bytes = sum(tensor.nbytes for tensor in self.live.values())
        run = SimpleNamespace(
            path=folder / "run", run_id="0" * 12, checkpoints=folder / "run" / "checkpoints",
            quarantine=folder / "run" / "quarantine", milestones=folder / "run" / "milestones",
        )  # fmt: skip
        run.path.mkdir()
        self.manager = CheckpointManager(
            folder=run, ranks=Ranks(), model=self.model, optimizer=self.optimizer,
            policy=CheckpointPolicy(keep_last=1),
        )  # fmt: skip
        self.step = 0
        self.ours: list[Any] = []

    def begin(self) -> None:
        self.step += 1
        self.manager.save(Position(self.step), facts={}, rank_state={})

    def mprecipes(self) -> dict[str, float]:
        self.begin()
        self.manager.wait()
        (report,) = self.manager.finished()
        assert report.error is None, report.error
        return {
            "blocked": report.blocked_seconds,
            "background": report.write_seconds,
            "digests": report.digest_seconds,
            "total": report.seconds,
        }

    def use_peers(self) -> None:
        """What only the peers need; their memory is not ours."""
        self.buffers = [torch.zeros_like(tensor) for tensor in self.live.values()]
        accelerator = Accelerator(cpu=True)
        self.prepared = accelerator.prepare(self.model, self.optimizer)
        self.accelerator = accelerator

    def copy_floor(self) -> dict[str, float]:
        began = time.perf_counter()
        for buffer, tensor in zip(self.buffers, self.live.values(), strict=True):
            buffer.copy_(tensor)
        return {"blocked": time.perf_counter() - began}

    def write_floor(self) -> dict[str, float]:
        """One file from warm memory, as the kernel likes it: no hash, no format, no commit."""
        began = time.perf_counter()
        descriptor = os.open(self.folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for buffer in self.buffers:
            data = memoryview(buffer.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            for start in range(0, len(data), CHUNK):
                os.write(descriptor, data[start : start + CHUNK])
        os.fdatasync(descriptor)
        os.close(descriptor)
        seconds = time.perf_counter() - began
        return {"background": seconds, "total": seconds}

    def torch_save(self) -> dict[str, float]:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return blocking(lambda: torch.save(state, self.folder / "torch.pt"))

    def save_state(self) -> dict[str, float]:
        return blocking(lambda: self.accelerator.save_state(str(self.folder / "accelerate")))

    def _dcp_state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def dcp_save(self) -> dict[str, float]:
        path = self.folder / "dcp"
        return blocking(lambda: dcp.save(self._dcp_state(), checkpoint_id=path))

    def dcp_async(self, kind: AsyncCheckpointerType) -> dict[str, float]:
        began = time.perf_counter()
        path = self.folder / f"dcp-{kind.value}"
        answer = dcp.async_save(self._dcp_state(), checkpoint_id=path, async_checkpointer_type=kind)
        if not hasattr(answer, "result"):  # AsyncSaveResponse: staging may go on in the background
            answer.staging_completion.result()
            answer = answer.upload_completion
        blocked = time.perf_counter() - began
        answer.result()
        return {"blocked": blocked, "total": time.perf_counter() - began}

    def engines(self) -> dict[str, Engine]:
        return {
            "copy into warm buffers (floor)": self.copy_floor,
            "write + fdatasync (floor)": self.write_floor,
            "mprecipes": self.mprecipes,
            "torch.save": self.torch_save,
            "accelerate.save_state": self.save_state,
            "dcp.save": self.dcp_save,
            "dcp.async_save, thread": lambda: self.dcp_async(AsyncCheckpointerType.THREAD),
            "dcp.async_save, process": lambda: self.dcp_async(AsyncCheckpointerType.PROCESS),
        }

    def clean(self) -> None:
        """Between saves nothing is dirty and nothing is left."""
        for path in self.folder.iterdir():
            if path.is_dir() and path.name != "run":
                shutil.rmtree(path)
            elif path.is_file():
                path.unlink()
        os.sync()


def blocking(work: Callable[[], object]) -> dict[str, float]:
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return {"blocked": seconds, "total": seconds}


def memory(bench: Bench) -> float:
    """Peak extra memory of two saves over the state, from a process that has not saved yet."""
    Path("/proc/self/clear_refs").write_text("5")  # Source: proc(5), resets VmHWM
    before = _status("VmRSS")
    for _ in range(2):
        bench.mprecipes()
    return (_status("VmHWM") - before) / bench.num_bytes


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])


def tiny_operations(bench: Bench, rounds: int) -> float:
    """Rate of a loop of tiny operations while a save is in flight, over its rate without one."""
    tensors = [torch.zeros(8) for _ in range(100)]

    def loop(stop: Callable[[int], bool]) -> float:
        began, count = time.perf_counter(), 0
        while not stop(count):
            for tensor in tensors:
                tensor.add_(1.0)
            count += 1
        return count / (time.perf_counter() - began)

    ratios = []
    for _ in range(rounds + 1):
        bench.clean()
        bench.begin()
        count = 0

        def ended(n: int) -> bool:
            nonlocal count
            count = n
            return bool(bench.manager.finished())

        during = loop(ended)
        bench.manager.wait()

        def as_long(n: int, total: int = count) -> bool:
            return bool(bench.manager.finished()) or n >= total  # asks as often, of no save

        ratios.append(during / loop(as_long))
    print("  tiny operations by round: " + ", ".join(f"{ratio:.3f}" for ratio in ratios[1:]))
    return statistics.median(ratios[1:])


def measure(size: str, rounds: int, folder: Path) -> None:
    bench, table = Bench(size, folder), Table()
    extra = memory(bench)
    bench.use_peers()
    tiny = tiny_operations(bench, rounds)
    for _ in range(rounds + 1):
        for name, engine in bench.engines().items():
            bench.clean()
            table.add(name, **engine())
    table.drop_first()
    columns = ["blocked", "background", "digests", "total"]
    table.show(f"{size}: one save", columns, bench.num_bytes)
    ours, floor = ("mprecipes", "blocked"), ("copy into warm buffers (floor)", "blocked")
    check("blocked / copy floor", table.paired(ours, floor), 1.25)
    for kind in ("thread", "process"):
        peer = (f"dcp.async_save, {kind}", "blocked")
        check(f"blocked / dcp.async_save, {kind}", table.paired(ours, peer), 1.0)
    written = ("write + fdatasync (floor)", "background"), ("mprecipes", "background")
    rate = table.paired(*written)
    check("rate of hash + write + fsync / raw write + fdatasync", rate, 0.85, at_most=False)
    check("peak extra memory / state", extra, 1.15)
    check("tiny operations during a save / without", tiny, 0.9, at_most=False)
    bench.manager.close()


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
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
