# SPDX-License-Identifier: Apache-2.0
"""Real launches of a recipe's `main()`, forked from a process that has only imported: seconds.

    done = run_recipe(["--output_dir", run, ...], world_size=2, plant="moments_zeroed")

Each rank is a process of its own that begins with `main()` and ends with its exit code, as under
`accelerate launch` without the launcher: nothing of one launch is left for the next. `plant` names
a function of tests/resume/plants.py that is called with the recipe's module before `main()`.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CLEARED = ("MPRECIPES_FAULT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ended:
    """A launch that ended.

    Attributes:
        codes: exit code by rank, negative for a signal.
        output: what the ranks printed, one after the other.
    """

    codes: list[int]
    output: str
    seconds: float

    @property
    def code(self) -> int:
        return self.codes[0]


def run_recipe(
    words: Sequence[object],
    *,
    recipe: str = "pretrain_causal_lm",
    world_size: int = 1,
    plant: str | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 120,
    grace: float = 20,
) -> Ended:
    """Runs a recipe to its end on `world_size` processes; called by tests.

    A rank that is still there `grace` seconds after another has ended with an error is killed.
    """
    job = {
        "words": [str(word) for word in words],
        "recipe": recipe,
        "world_size": world_size,
        "plant": plant,
        "env": env or {},
        "timeout": timeout,
        "grace": grace,
    }
    process = _server()
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, "the recipe server died"
    return Ended(**json.loads(line))


@functools.cache
def _server() -> subprocess.Popen:
    """Started by the first call, ended with the tests."""
    from tests.launching import environment

    command = [sys.executable, __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, env=environment(), cwd=ROOT)
    atexit.register(process.communicate)
    return process


def serve() -> None:
    """The server: imports once, forks the ranks of each job."""
    import torch
    import torch._dynamo  # the first optimizer imports it, seconds in every child
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers.hf_argparser import HfArgumentParser  # noqa: F401

    import mprecipes as mp

    torch.set_num_threads(1)
    _load("pretrain_causal_lm")
    for name in mp.__all__:
        getattr(mp, name)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(_run(_load(job["recipe"]), job)), flush=True)


@functools.cache
def _load(name: str):
    """Gives a recipe as a module; the first job of each waits for its imports."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
    recipe = importlib.util.module_from_spec(spec)
    sys.modules[name] = recipe  # dataclasses look their module up
    spec.loader.exec_module(recipe)
    return recipe


def _run(recipe, job: dict) -> dict:
    began, port = time.monotonic(), _free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(job["world_size"])]
        pids = {_fork(recipe, job, rank, port, log): rank for rank, log in enumerate(logs)}
        codes: dict[int, int] = {}
        deadline = began + job["timeout"]
        while len(codes) < len(pids):
            for pid, rank in pids.items():
                if rank in codes:
                    continue
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank] != 0:
                        deadline = min(deadline, time.monotonic() + job["grace"])
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)  # not reaped yet: the pid is still its own
            time.sleep(0.002)
        output = "".join(log.read_text(errors="replace") for log in logs if log.exists())
    by_rank = [codes[rank] for rank in sorted(codes)]
    return {"codes": by_rank, "output": output, "seconds": time.monotonic() - began}


def _fork(recipe, job: dict, rank: int, port: int, log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
        for target in (1, 2):
            os.dup2(descriptor, target)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for name in CLEARED:
            os.environ.pop(name, None)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world_size"]),
            LOCAL_WORLD_SIZE=str(job["world_size"]), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), ACCELERATE_USE_CPU="true",
        )  # fmt: skip
        os.environ.update(job["env"])
        sys.argv = [f"{job['recipe']}.py", *job["words"]]
        import mprecipes as mp

        if job["plant"]:
            from tests.resume import plants

            getattr(plants, job["plant"])(recipe)
        with mp.exit_codes():
            recipe.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - whatever it is, the test is told
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    serve()
