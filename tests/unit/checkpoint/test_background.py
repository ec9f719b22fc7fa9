# SPDX-License-Identifier: Apache-2.0
"""The thread that works beside the training."""

import os
import threading

import pytest
import torch

from mprecipes.checkpoint.background import NICENESS, background_thread


def test_the_background_yields_to_the_training():
    """Lower priority and one torch thread there; here nothing changes."""
    before = torch.get_num_threads()
    with background_thread("test") as thread:
        assert thread.submit(torch.get_num_threads).result() == 1
        there = thread.submit(
            lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        ).result()
    assert torch.get_num_threads() == before
    here = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert there == min(19, here + NICENESS)


def test_the_thread_outlives_what_its_work_raises():
    """Also what would end another thread is the result of the work."""
    with background_thread("test") as thread:
        with pytest.raises(SystemExit):
            thread.submit(exit_now).result()
        assert thread.submit(int).result() == 0


def exit_now():
    raise SystemExit(3)
