# SPDX-License-Identifier: Apache-2.0
"""Work beside the training: one thread that yields the processor to it."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

NICENESS = 10


def background_thread(name: str) -> ThreadPoolExecutor:
    """Starts one thread of lower priority, on which torch computes with one thread.

    Whatever its work raises is the result of that work, and the thread lives on; the interpreter
    waits for submitted work before it ends.
    """
    num_threads = torch.get_num_threads()
    executor = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_step_back)
    executor.submit(int).result()  # starts it
    torch.set_num_threads(num_threads)
    return executor


def _step_back() -> None:
    torch.get_num_threads()  # the first call of a thread sets what all have
    torch.set_num_threads(1)  # OpenMP's number of this thread; it also becomes that of later ones
    with contextlib.suppress(OSError, AttributeError):  # per thread on Linux, elsewhere unknown
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, own + NICENESS))
