# SPDX-License-Identifier: Apache-2.0
"""Really launches a recipe under accelerate, watches it, and leaves no process behind.

    done = launch("recipes/pretrain_causal_lm.py", ["--config", CONFIG, "--output_dir", run])
    assert done.returncode == 0, done.output

    with start(recipe, args, num_processes=2) as running:
        running.wait_until(lambda: (run / "journal").exists())
        os.kill(running.workers()[1].pid, signal.SIGTERM)
        done = running.finish()

The elastic launcher starts every worker in a session of its own, so a process group does not hold
them all; each launch carries a mark in its environment by which its processes are found instead.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
TEST_ID = "MPRECIPES_TEST_ID"  # set around each test marked `launch` (tests/conftest.py)
LAUNCH_ID = "MPRECIPES_TEST_LAUNCH_ID"
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Launched:
    """A launch that ended.

    Attributes:
        output: stdout and stderr of the launcher and all workers, in the order they came.
        seconds: wall time from start to the launcher's end.
    """

    returncode: int
    output: str
    seconds: float


class Running:
    """A launch in progress; a context manager that ends what is left of it.

    Attributes:
        process: the launcher itself, in a session of its own (`process.pid` is its group).
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self._launch_id = uuid.uuid4().hex
        self._log = tempfile.NamedTemporaryFile(prefix="launch-", suffix=".log")  # noqa: SIM115
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**env, LAUNCH_ID: self._launch_id},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
        self._log.close()

    def output(self) -> str:
        """Gives what the launch printed so far."""
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Gives every living process of this launch, the launcher included."""
        return marked_processes(LAUNCH_ID, self._launch_id)

    def workers(self) -> dict[int, psutil.Process]:
        """Gives the recipe's processes by rank, without children such as loader workers."""
        found: dict[int, psutil.Process] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.ppid() == self.process.pid and "RANK" in process.environ():
                    found[int(process.environ()["RANK"])] = process
        return found

    def wait_until(self, condition: Callable[[], bool], *, timeout: float = 120) -> None:
        """Waits for a condition; fails with the output when the launch ends or takes too long."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None and not condition():
                pytest.fail(f"ended ({self.process.returncode}) too early:\n{self.output()}")
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout} s:\n{self.output()}")
            time.sleep(POLL_SECONDS)

    def finish(self, *, timeout: float = 240) -> Launched:
        """Waits for the launcher's end; at the time limit ends it and fails with its output."""
        try:
            returncode = self.process.wait(max(0.0, timeout))
        except subprocess.TimeoutExpired:
            self.end()
            pytest.fail(f"no end within {timeout} s:\n{self.output()}")
        return Launched(returncode, self.output(), time.monotonic() - self._started)

    def end(self) -> None:
        """Kills what is left of this launch, each process by its own id."""
        end_processes(self.processes())
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(
    script: str | Path,
    args: Sequence[object] = (),
    *,
    config: str | Path = "accelerate_configs/cpu.yaml",
    num_processes: int = 1,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Running:
    """Starts a script under `accelerate launch` and returns at once; use it in a `with`.

    Args:
        script: a recipe, relative to the repository or absolute.
        args: its command line; every item is turned into text.
        config: accelerate config, relative to the repository or absolute.
        env: variables on top of the tests' own.
        cwd: where to launch from; the repository by default.
    """
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(ROOT / config)),
        *("--num_processes", str(num_processes)),
        *("--main_process_port", "0"),
        str(ROOT / script),
        *map(str, args),
    ]
    return Running(command, environment(env), ROOT if cwd is None else cwd)


def launch(
    script: str | Path,
    args: Sequence[object] = (),
    *,
    config: str | Path = "accelerate_configs/cpu.yaml",
    num_processes: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    cwd: Path | None = None,
) -> Launched:
    """Runs a script under `accelerate launch` to its end; arguments as for `start`."""
    with start(
        script, args, config=config, num_processes=num_processes, env=env, cwd=cwd
    ) as running:
        return running.finish(timeout=timeout)


def run_command(
    command: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
    cwd: Path | None = None,
) -> Launched:
    """Runs any other command (`mprecipes drill ...`) with the same care.

    A command that begins with `mprecipes` or `accelerate` runs with the tests' own interpreter.
    """
    words = [str(word) for word in command]
    modules = {"mprecipes": "mprecipes", "accelerate": "accelerate.commands.accelerate_cli"}
    if words[0] in modules:
        words[:1] = [sys.executable, "-m", modules[words[0]]]
    with Running(words, environment(env), ROOT if cwd is None else cwd) as running:
        return running.finish(timeout=timeout)


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Gives the variables every launched process of the tests has: no network, one thread."""
    known = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    for name in ("MPRECIPES_FAULT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        known.pop(name, None)
    path = os.pathsep.join(filter(None, [str(ROOT), known.get("PYTHONPATH")]))
    return {
        **known,
        "PYTHONPATH": path,  # a recipe outside the repository finds mprecipes uninstalled too
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "MPRECIPES_CPU_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "TOKENIZERS_PARALLELISM": "false",
        "COLUMNS": "120",
        **(env or {}),
    }


def marked_processes(variable: str, value: str) -> list[psutil.Process]:
    """Gives every living process, except this one, that was started with `variable=value`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                found.append(process)
    return found


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Kills these processes by id and waits until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
