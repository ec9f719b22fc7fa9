# SPDX-License-Identifier: Apache-2.0
"""Launches end for certain, are followed while they run, and see only the fault meant for them."""

import signal
import sys
from pathlib import Path

import pytest

from mprecipes.tools.processes import JournalFollower, launch, tail, unwind_on_terminate

SPAWN = """
import pathlib, subprocess, sys
sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
child = subprocess.Popen(sleeper, start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
"""


def run(
    tmp_path: Path, *arguments: str, fault: str | None = None, timeout: float = 60.0, seen=None
):
    return launch(
        [sys.executable, "-c", *arguments],
        journal=tmp_path / "journal",
        log=tmp_path / "log",
        fault=fault,
        timeout=timeout,
        on_record=(seen if seen is not None else []).append,
    )


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_return_code_and_output(tmp_path):
    """A launch gives its return code, and what it printed stands in the log."""
    outcome = run(tmp_path, "print('hello'); raise SystemExit(5)")
    assert outcome.returncode == 5
    assert outcome.seconds > 0
    assert tail(tmp_path / "log") == "hello"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")
def test_worker_in_its_own_session_is_ended(tmp_path):
    """A worker that left the launcher's process group does not outlive the launch."""
    assert run(tmp_path, SPAWN, str(tmp_path / "pid")).returncode == 0
    assert not alive(int((tmp_path / "pid").read_text()))


def test_time_limit_ends_the_launch(tmp_path):
    """A launch past its time limit is killed and reports no return code."""
    outcome = run(tmp_path, "import signal; signal.pause()", timeout=0.3)
    assert outcome.returncode is None
    assert 0.3 <= outcome.seconds < 30


def test_fault_reaches_only_the_launch_it_is_for(tmp_path, monkeypatch):
    """The planted fault is in the environment of its launch, and no other fault is."""
    show = "import os; print(os.environ.get('MPRECIPES_FAULT'))"
    run(tmp_path, show, fault="kill@step:7")
    assert tail(tmp_path / "log") == "kill@step:7"
    monkeypatch.setenv("MPRECIPES_FAULT", "kill@step:3")
    run(tmp_path, show)
    assert tail(tmp_path / "log") == "None"


def test_package_is_importable_from_anywhere(tmp_path, monkeypatch):
    """A launch in another folder imports this package, installed or not."""
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, "import mprecipes.faults").returncode == 0, tail(tmp_path / "log")


def test_follower_gives_whole_lines_once(tmp_path):
    """Lines are given when complete, once, from every attempt that is new."""
    old, new = tmp_path / "attempt-0000.jsonl", tmp_path / "attempt-0001.jsonl"
    old.write_text('{"step": 1}\n')
    follower = JournalFollower(tmp_path)
    assert follower.poll() == []
    new.write_text('{"step": 1}\n{"st')
    assert follower.poll() == [{"step": 1}]
    with open(new, "a") as file:
        file.write('ep": 2}\n')
    assert follower.poll() == [{"step": 2}]
    assert follower.poll() == []


def test_records_are_handed_over(tmp_path):
    """Records written by the launch reach the caller, also those of its last moment."""
    seen: list[dict] = []
    write = (
        "import pathlib, sys; f = pathlib.Path(sys.argv[1]); f.mkdir();"
        "(f / 'attempt-0000.jsonl').write_text('{\"step\": 1}\\n{\"step\": 2}\\n')"
    )
    run(tmp_path, write, str(tmp_path / "journal"), seen=seen)
    assert [record["step"] for record in seen] == [1, 2]


def test_terminate_unwinds():
    """SIGTERM inside the guard raises SystemExit, and the handler before it comes back."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, unwind_on_terminate():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_tail_of_nothing(tmp_path):
    """A log that was never written reads as no output, not as an error."""
    assert tail(tmp_path / "absent") == "(no output)"
    (tmp_path / "log").write_bytes(b"a\nb\nc\xff\n")
    assert tail(tmp_path / "log", lines=2) == "b\nc\ufffd"


def test_tail_leaves_the_launcher_out(tmp_path):
    """Of a failed worker's log the worker's own error is shown, not the launcher's traceback."""
    own = "Traceback (most recent call last):\n  recipe.py\nValueError: the cause"
    launcher = "Traceback (most recent call last):\n  launch.py\nChildFailedError:\n" + "=\n" * 40
    (tmp_path / "log").write_text(f"{own}\n{launcher}")
    assert tail(tmp_path / "log") == own
