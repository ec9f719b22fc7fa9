# SPDX-License-Identifier: Apache-2.0
"""The most memory this process has held so far, of its device and of its host."""

import contextlib
import resource
import sys
from pathlib import Path


def peak_memory() -> dict[str, int]:
    """Gives peaks in bytes under their metric names; the device's only where there is a GPU.

    Costs microseconds and waits for no device.
    """
    import torch

    peaks = {"perf/host_memory_bytes": peak_host_bytes()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        peaks["perf/device_memory_bytes"] = torch.cuda.max_memory_allocated()
    return peaks


def peak_host_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Gives the peak resident memory of this program.

    Linux's VmHWM begins anew with the program; `ru_maxrss`, used elsewhere, begins with the size of
    the process that started it (source: Linux, fs/exec.c `exec_mmap`).
    """
    with contextlib.suppress(OSError):
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
