# SPDX-License-Identifier: Apache-2.0
"""A request to stop becomes a flag, whichever way it comes."""

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from mprecipes.resume.signals import Signals

CHILD = """
import sys
from mprecipes.resume.signals import Signals
with Signals() as signals:
    print("ready", signals.requested, flush=True)
    for line in sys.stdin:
        print(signals.requested, flush=True)
"""
PARENT = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print("started", flush=True)
os.read(int(sys.argv[2]), 1)
"""


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        **options,
    )


def ask(process):
    process.stdin.write("?\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_to_a_real_process_is_remembered_and_kills_nothing(name):
    """The process goes on, knows which signal came first, and repeats change nothing."""
    child = start(CHILD)
    assert child.stdout.readline().strip() == "ready None"
    for number in (getattr(signal, name), signal.SIGTERM, signal.SIGUSR1):
        child.send_signal(number)
        assert ask(child) == name
    child.stdin.close()
    assert child.wait(timeout=60) == 0
    child.stdout.close()


def test_the_death_of_the_launcher_is_a_request():
    """A process whose parent died knows it at the next question."""
    hold, release = os.pipe()
    parent = start(PARENT, CHILD, str(hold), pass_fds=[hold])
    os.close(hold)
    assert {parent.stdout.readline().strip() for _ in range(2)} == {"started", "ready None"}
    assert ask(parent) == "None"  # the grandchild shares its parent's pipes
    os.close(release)
    assert parent.wait(timeout=60) == 0
    assert ask(parent) == "the launcher died"
    parent.stdin.close()
    assert parent.stdout.read() == ""
    parent.stdout.close()


@pytest.mark.parametrize(("seconds", "insists"), [(2.9, False), (3.0, True)])
def test_a_second_interrupt_three_seconds_later_is_insistence(seconds, insists):
    """One Ctrl-C reaches a process twice; a later one means now."""
    now = [100.0]
    with Signals(clock=lambda: now[0]) as signals:
        signal.raise_signal(signal.SIGINT)
        now[0] += seconds
        if insists:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        else:
            signal.raise_signal(signal.SIGINT)
        assert signals.requested == "SIGINT"


def test_an_interrupt_after_another_signal_is_not_insistence():
    """Only SIGINT counts as a first SIGINT, however long ago SIGTERM came."""
    now = [0.0]
    with Signals(clock=lambda: now[0]) as signals:
        signal.raise_signal(signal.SIGTERM)
        now[0] = 60.0
        signal.raise_signal(signal.SIGINT)
        assert signals.requested == "SIGTERM"


def test_the_handlers_of_before_come_back():
    """Leaving the context restores what was installed, also after an error."""
    before = [signal.getsignal(number) for number in Signals.watched]
    with pytest.raises(RuntimeError), Signals():
        assert [signal.getsignal(number) for number in Signals.watched] != before
        raise RuntimeError
    assert [signal.getsignal(number) for number in Signals.watched] == before


def test_outside_the_main_thread_nothing_is_installed():
    """Python refuses handlers there; entering is harmless."""
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with Signals() as signals:
            seen.append((signal.getsignal(signal.SIGTERM), signals.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, None)]


def test_a_file_stop_is_a_request_and_is_removed_at_the_end(tmp_path):
    """On the main process, at the next look; the next run in the folder is not stopped by it."""
    now = [0.0]
    with Signals(clock=lambda: now[0]) as signals:
        should_stop = signals.watch(SimpleNamespace(path=tmp_path, writes_here=True))
        assert not should_stop()
        (tmp_path / "STOP").touch()
        assert not should_stop()
        now[0] = 1.0
        assert should_stop()
        assert signals.requested == "a file STOP"
        assert "asked to stop (a file STOP); step 7 is saved" in str(signals.preempted(7))
        assert (tmp_path / "STOP").exists()  # what it asks for has not ended yet
    assert not (tmp_path / "STOP").exists()


def test_other_ranks_do_not_look(tmp_path):
    """They hear of it in the step's reduction."""
    (tmp_path / "STOP").touch()
    with Signals() as signals:
        assert not signals.watch(SimpleNamespace(path=tmp_path, writes_here=False))()
    assert (tmp_path / "STOP").exists()


def test_a_file_stop_that_nobody_saw_stays(tmp_path):
    """The run ended for another reason before it was looked for."""
    now = [0.0]
    with Signals(clock=lambda: now[0]) as signals:
        assert not signals.watch(SimpleNamespace(path=tmp_path, writes_here=True))()
        (tmp_path / "STOP").touch()
    assert (tmp_path / "STOP").exists()


def test_a_signal_answers_the_file_too(tmp_path):
    """Whoever asked twice is not asked for twice."""
    with Signals() as signals:
        should_stop = signals.watch(SimpleNamespace(path=tmp_path, writes_here=True))
        (tmp_path / "STOP").touch()
        signal.raise_signal(signal.SIGTERM)
        assert should_stop()
    assert not (tmp_path / "STOP").exists()
