# SPDX-License-Identifier: Apache-2.0
"""The lease of a run folder: one live process writes there, and a dead one is found out.

`lease.json` holds host, machine (boot and process namespace), pid, process_start, heartbeat (unix
seconds), attempt, token and step. A holder on this machine lives while its process does; a holder
elsewhere lives while its last heartbeat is younger than 60 seconds. Clocks of machines that share a
folder must agree within that time.

Two launches cannot both take a lease on one machine, nor over a file system whose `flock` reaches
every machine. Where it does not, the later writer wins and the earlier one finds its lease lost at
its next heartbeat (`is_lost`).
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mprecipes.errors import RunFolderBusy
from mprecipes.identity.files import write_json_atomically

FILE, LOCK_FILE = "lease.json", ".lease.lock"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """What a lease says about the process that holds it; `heartbeat` in unix seconds."""

    host: str
    pid: int
    heartbeat: float
    attempt: int = 0
    process_start: int | None = None
    machine: str = ""
    token: str = ""
    step: int = 0

    @property
    def age_seconds(self) -> float:
        return max(0.0, time.time() - self.heartbeat)

    @property
    def is_here(self) -> bool:
        """True when the holder's pid means something to this process."""
        return self.host == socket.gethostname() and self.machine in ("", _machine())

    @property
    def is_live(self) -> bool:
        if not self.is_here:
            return self.age_seconds < STALE_SECONDS
        return _is_alive(self.pid, self.process_start)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (attempt {self.attempt})"


def read_holder(folder: Path) -> Holder | None:
    """Gives who the lease of a run folder names, dead or alive; None without a lease.

    A lease that cannot be read counts as held elsewhere since its last change.
    """
    path = folder / FILE
    try:
        known = Holder.__dataclass_fields__
        facts = json.loads(path.read_text(encoding="utf-8"))
        holder = Holder(**{name: value for name, value in facts.items() if name in known})
        return replace(holder, pid=int(holder.pid), heartbeat=float(holder.heartbeat))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, AttributeError):
        return Holder(host="unknown", pid=0, heartbeat=path.stat().st_mtime)


def refuse_live(folder: Path) -> None:
    """Changes nothing.

    Raises:
        RunFolderBusy: another process is alive there.
    """
    holder = read_holder(folder)
    if holder is not None and holder.is_live:
        raise _busy(folder, holder)


class Lease:
    """This process's hold on a run folder; make it with `acquire`.

    Attributes:
        taken_over: the dead holder this lease was taken from, or None.
        is_lost: True once another process holds the folder; this one must stop writing.
        num_failed_heartbeats: heartbeats that could not be written; they stop nothing.
    """

    def __init__(self, folder: Path, holder: Holder, taken_over: Holder | None) -> None:
        self.folder, self.taken_over = folder, taken_over
        self.is_lost, self.num_failed_heartbeats = False, 0
        self._holder, self._step = holder, lambda: 0
        self._stop, self._writing = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    @classmethod
    def acquire(cls, folder: Path) -> "Lease":
        """Takes the lease of an existing folder, also from a dead holder.

        Raises:
            RunFolderBusy: another process is alive there.
        """
        with _locked(folder):
            refuse_live(folder)
            before = read_holder(folder)
            holder = Holder(
                host=socket.gethostname(),
                pid=os.getpid(),
                heartbeat=time.time(),
                process_start=(_stat(os.getpid()) or ("", None))[1],
                machine=_machine(),
                token=secrets.token_hex(8),
            )
            lease = cls(folder, holder, before)
            write_json_atomically(folder / FILE, asdict(holder))
        return lease

    def start(
        self, attempt: int, step: Callable[[], int], *, seconds: float = HEARTBEAT_SECONDS
    ) -> None:
        """Starts the thread that renews the heartbeat, and the step last told, until `release`."""
        self._holder, self._step = replace(self._holder, attempt=attempt), step
        self.beat()
        self._thread = threading.Thread(
            target=self._renew, args=(seconds,), name="lease", daemon=True
        )
        self._thread.start()

    def beat(self) -> None:
        """Renews the lease once, unless it is released or lost; a failed write is counted."""
        with self._writing:
            if self._stop.is_set() or self.is_lost:
                return
            try:
                with _locked(self.folder):
                    if self._belongs_to_another():
                        self.is_lost = True
                        log.error("%s: another process took this run folder", FILE)
                        return
                    now = {"heartbeat": time.time(), "step": self._step()}
                    write_json_atomically(self.folder / FILE, {**asdict(self._holder), **now})
            except OSError as error:
                self.num_failed_heartbeats += 1
                if self.num_failed_heartbeats == 1:
                    log.warning("%s: heartbeat not written (%s); the run goes on", FILE, error)

    def release(self) -> None:
        """Stops the heartbeat, waits for one being written, removes the lease if still ours."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            with self._writing, _locked(self.folder):
                if not self._belongs_to_another():
                    (self.folder / FILE).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: not removed (%s); it is stale once this process ends", FILE, error)

    def check(self) -> None:
        """Asks the disk whether this lease still holds.

        Raises:
            RunFolderBusy: another process took it, because this one seemed dead.
        """
        holder = read_holder(self.folder)
        if holder is not None and holder.token != self._holder.token:
            self.is_lost = True
            raise _busy(self.folder, holder)

    def _belongs_to_another(self) -> bool:
        holder = read_holder(self.folder)
        return holder is not None and holder.token != self._holder.token

    def _renew(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            self.beat()


def _is_alive(pid: int, start: int | None) -> bool:
    """Whether the process of this machine with that pid and start time runs; a zombie is dead."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's, alive
    if (found := _stat(pid)) is None:
        return True
    return found[0] not in ("Z", "X") and start in (None, found[1])


def _stat(pid: int) -> tuple[str, int] | None:
    """Gives a process's state letter and start time in clock ticks since boot; None if untold."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # Source: proc(5); the name in brackets may hold anything, the state follows the last bracket
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _machine() -> str:
    """Gives what two processes share when a pid of one means the same to the other."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; the kernel drops it with the process."""
    with open(folder / LOCK_FILE, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            log.warning("%s: no file locks here (%s)", LOCK_FILE, error)
        try:
            yield
        finally:  # by name, not by closing: a child forked meanwhile holds the file open, too
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _busy(folder: Path, holder: Holder) -> RunFolderBusy:
    if holder.is_here:
        action = f"wait for it, or stop it (kill {holder.pid}), or use another --output_dir"
    else:
        left = max(1, round(STALE_SECONDS + holder.heartbeat - time.time()))
        action = f"wait; if it is dead launch again in {left} s; or use another --output_dir"
    ahead = holder.heartbeat - time.time()
    last = f"{holder.age_seconds:.0f} s ago"
    if ahead > STALE_SECONDS / 2 and not holder.is_here:
        last = f"by a clock that is {ahead:.0f} s ahead of the one here"
        action += f"; once you know that it is dead, remove {FILE}"
    return RunFolderBusy(
        f"{holder} is running here, last heartbeat {last}",
        expected="no other live process in this run folder",
        where=str(folder / FILE),
        action=action,
    )
