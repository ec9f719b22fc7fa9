# SPDX-License-Identifier: Apache-2.0
"""The seam at which faults are planted: silent without its variable, exact with it."""

import errno
import random
import signal
import subprocess
import sys
import time

import pytest

from mprecipes.faults import fault_point


def test_without_the_variable_nothing_happens(monkeypatch):
    """An ordinary run passes every point."""
    monkeypatch.delenv("MPRECIPES_FAULT", raising=False)
    assert fault_point("save.begin", 3) is None


@pytest.mark.parametrize(("action", "number"), [("eio", errno.EIO), ("enospc", errno.ENOSPC)])
def test_a_planted_error_is_raised_at_its_point_only(monkeypatch, action, number):
    """The named point raises the OSError of that number, another point does not."""
    monkeypatch.setenv("MPRECIPES_FAULT", f"{action}@save.begin")
    fault_point("save.after_file", 3)
    with pytest.raises(OSError, match=r"planted fault at save\.begin") as caught:
        fault_point("save.begin")
    assert caught.value.errno == number


def test_step_and_rank_narrow_a_fault(monkeypatch):
    """`:STEP` and `@rankR` must both match; the second fault of a list counts too."""
    monkeypatch.setenv("MPRECIPES_FAULT", "eio@other, eio@save.begin:4@rank1")
    for rank, step in (("0", 4), ("1", 3), ("1", None)):
        monkeypatch.setenv("RANK", rank)
        fault_point("save.begin", step)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(OSError, match=r"save\.begin"):
        fault_point("save.begin", 4)


@pytest.mark.parametrize(
    ("action", "number"), [("kill", signal.SIGKILL), ("terminate", signal.SIGTERM)]
)
def test_a_planted_signal_ends_the_process(action, number):
    """kill is SIGKILL, terminate is SIGTERM, to the process itself."""
    script = "from mprecipes.faults import fault_point; fault_point('step'); print('alive')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"MPRECIPES_FAULT": f"{action}@step"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == -number
    assert done.stdout == b""


def test_an_unknown_action_is_refused(monkeypatch):
    """A typing error in a planted fault is an error, not a test that tests nothing."""
    monkeypatch.setenv("MPRECIPES_FAULT", "kil@step")
    with pytest.raises(ValueError, match="unknown action 'kil'; use kill, terminate, eio, enospc"):
        fault_point("step")


def test_a_planted_delay_waits_a_little_and_draws_no_random_numbers(monkeypatch):
    """At most 50 ms a visit, and the process's own random stream is where it was."""
    monkeypatch.setenv("MPRECIPES_FAULT", "delay@save.begin")
    state, began = random.getstate(), time.monotonic()
    for _ in range(20):
        fault_point("save.begin", 3)
    assert 0.02 < time.monotonic() - began < 30
    assert random.getstate() == state
