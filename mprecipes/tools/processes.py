# SPDX-License-Identifier: Apache-2.0
"""One launch of a recipe in processes of its own, followed through its journal, ended for certain.

Promises: when `launch` returns or raises, no process of the launch is left, workers included. The
elastic launcher starts each worker in a session of its own, so killing the launcher's process group
does not reach them; every process of a launch therefore carries a token in its environment, by
which the rest are found and killed one by one. That search reads /proc: Linux only.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mprecipes import faults

TOKEN = "MPRECIPES_LAUNCH_TOKEN"
POLL_SECONDS = 0.1
END_SECONDS = 10.0


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: `returncode` is None when the time limit ended it."""

    returncode: int | None
    seconds: float


class JournalFollower:
    """Gives the journal lines that have become complete since the last look.

    Args:
        folder: the `journal` folder of a run; may not exist yet. Lines already there are skipped.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets = {path: path.stat().st_size for path in folder.glob("attempt-*.jsonl")}

    def poll(self) -> list[dict[str, Any]]:
        records = []
        for path in sorted(self._folder.glob("attempt-*.jsonl")):
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):  # only a display; the comparison counts these
                    records.append(json.loads(line))
        return records


class Launching:
    """A launch in progress; a context manager that leaves no process of it behind.

    Args:
        command: the launcher's command line.
        journal: journal folder of the run it starts, followed while it runs.
        log: file that receives stdout and stderr of all its processes.
        fault: value of MPRECIPES_FAULT for its processes; None for none, whatever the caller has.
        variables: environment variables on top of the caller's.
    """

    def __init__(
        self,
        command: list[str],
        *,
        journal: Path,
        log: Path,
        fault: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._token, self._ended = uuid.uuid4().hex, False
        environment = {key: value for key, value in os.environ.items() if key != faults.VARIABLE}
        environment |= {**(variables or {}), TOKEN: self._token}
        if fault:
            environment[faults.VARIABLE] = fault
        _make_importable(environment)
        self._follower = JournalFollower(journal)
        self._started = time.monotonic()
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        """How long it has been going on."""
        return time.monotonic() - self._started

    def records(self) -> list[dict[str, Any]]:
        """Gives the journal records that are new since the last call."""
        return self._follower.poll()

    def wait(self, seconds: float) -> int | None:
        """Gives the return code, or None when it is still going on after so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=seconds)
        return None

    def ask_to_stop(self) -> None:
        """Sends SIGTERM to the launcher, which passes it on: a recipe then saves and ends."""
        self._process.terminate()

    def __enter__(self) -> "Launching":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kills what is left of it; again does nothing."""
        if not self._ended:
            self._ended = True  # its process id may soon be another's
            _end(self._process, self._token)


def launch(
    command: list[str],
    *,
    journal: Path,
    log: Path,
    fault: str | None,
    timeout: float,
    on_record: Callable[[dict[str, Any]], None],
) -> Outcome:
    """Runs a command to its end and leaves no process behind; blocks for as long as it runs.

    Args:
        command, journal, log, fault: as for `Launching`.
        timeout: seconds after which the launch is killed.
        on_record: called with each new journal record.
    """
    with Launching(command, journal=journal, log=log, fault=fault) as launching:
        returncode: int | None = None
        while returncode is None and launching.seconds < timeout:
            returncode = launching.wait(POLL_SECONDS)
            for record in launching.records():
                on_record(record)
        return Outcome(returncode, launching.seconds)


def _make_importable(environment: dict[str, str]) -> None:
    """A recipe outside the checkout finds the package although nothing was installed."""
    root = Path(__file__).resolve().parents[2]
    if (
        root / "accelerate_configs"
    ).is_dir():  # a checkout; site-packages may not precede the stdlib
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(root), known] if known else [str(root)])


def _end(process: subprocess.Popen[bytes], token: str) -> None:
    """Kills the launcher's process group and every process that carries the token."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + END_SECONDS
    while _kill_marked(token) and time.monotonic() < deadline:
        time.sleep(0.02)


def _kill_marked(token: str) -> int:
    """Sends SIGKILL to each living process with the token; gives how many there were."""
    if sys.platform != "linux":
        return 0
    mark, killed = f"{TOKEN}={token}".encode(), 0
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(int(entry))  # a reused process id cannot be hit by mistake
            try:
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    killed += 1
            finally:
                os.close(descriptor)
    return killed


@contextlib.contextmanager
def unwind_on_terminate() -> Iterator[None]:
    """SIGTERM to this process unwinds its stack, so that launches are ended, not orphaned."""

    def unwind(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, unwind)
    except ValueError:  # not the main thread: whoever owns the signals decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def tail(log: Path, lines: int = 30) -> str:
    """Gives the last lines of a log, without the traceback that the elastic launcher adds.

    Undecodable bytes are replaced.
    """
    text = log.read_bytes()[-64 * 1024 :].decode("utf-8", errors="replace") if log.exists() else ""
    if "ChildFailedError" in text:  # its traceback is the launcher's, and always the last one
        text = text.rpartition("Traceback (most recent call last):")[0] or text
    return "\n".join(text.splitlines()[-lines:]) or "(no output)"
