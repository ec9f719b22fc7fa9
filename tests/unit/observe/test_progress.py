# SPDX-License-Identifier: Apache-2.0
"""The console: a bar for people, lines for files, and no way to stop the run."""

import errno
import io
import os
import subprocess
import sys

import pytest

from mprecipes.observe.progress import Progress


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self):
        return True


class Broken(io.StringIO):
    """A stream that fails at a chosen write with a chosen error."""

    def __init__(self, error, *, after=0, terminal=False):
        super().__init__()
        self.error, self.after, self.terminal, self.writes = error, after, terminal, 0

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.writes += 1
        if self.writes > self.after:
            raise self.error
        return super().write(text)


@pytest.fixture(autouse=True)
def ordinary_terminal(monkeypatch):
    """The same terminal whatever the tests run in."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")


def test_a_log_file_gets_a_plain_line_every_logging_steps():
    """Without a terminal: one line every 10 steps and at the last step, no control characters."""
    clock, file = Clock(), io.StringIO()
    with Progress(25, enabled=True, logging_steps=10, file=file, clock=clock) as progress:
        for step in range(1, 26):
            clock.now += 0.5
            progress.update(
                step,
                loss=5.0 - step / 10,
                tokens_per_second=1234.56,
                learning_rate=2e-3,
                last_checkpoint_step=20 if step >= 20 else None,
            )
    assert file.getvalue().splitlines() == [
        "step 10/25  loss 4.0000  1,235 tokens/s  lr 2.000e-03  ETA 0:08",
        "step 20/25  loss 3.0000  1,235 tokens/s  lr 2.000e-03  ETA 0:02  checkpoint 20",
        "step 25/25  loss 2.5000  1,235 tokens/s  lr 2.000e-03  ETA 0:00  checkpoint 20",
    ]


def test_the_time_left_counts_only_steps_of_this_process():
    """After a resume at step 1000 and two steps of 3 s, 98 steps are 4:54; more shows hours."""
    for total, expected in ((1100, "ETA 4:54"), (5000, "ETA 3:19:54")):
        clock, file = Clock(), io.StringIO()
        with Progress(total, 1000, logging_steps=1, file=file, clock=clock) as progress:
            for step in (1001, 1002):
                clock.now += 3.0
                progress.update(step, loss=1.0)
        assert file.getvalue().splitlines()[-1] == f"step 1002/{total}  loss 1.0000  {expected}"


def test_a_loss_that_is_not_finite_is_shown():
    """The console does not hide a NaN."""
    file = io.StringIO()
    with Progress(1, file=file) as progress:
        progress.update(1, loss=float("nan"))
    assert file.getvalue().startswith("step 1/1  loss nan")


def test_a_terminal_gets_a_bar_with_everything_on_it():
    """The bar shows step, loss, tokens/s, time left and checkpoint, and a note goes above it."""
    clock, file = Clock(), Terminal()
    with Progress(100, 40, file=file, clock=clock) as progress:
        clock.now += 2.0
        progress.update(41, loss=2.25, tokens_per_second=640.0, last_checkpoint_step=40)
        progress.note("[resume] verified")
    shown = file.getvalue()
    for part in ("41/100", "loss 2.2500", "640 tokens/s", "ETA 1:58", "checkpoint 40"):
        assert part in shown
    assert "[resume] verified\n" in shown
    assert "\x1b[" in shown


def test_the_bar_is_redrawn_at_most_ten_times_a_second():
    """A thousand steps in a tenth of a second draw once, and the last step always does."""
    clock, file = Clock(), Terminal()
    with Progress(1000, file=file, clock=clock) as progress:
        before = len(file.getvalue())
        for step in range(1, 1000):
            clock.now += 0.0001
            progress.update(step, loss=1.0)
        assert len(file.getvalue()) == before
        progress.update(1000, loss=1.0)
        assert "1000/1000" in file.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    """TERM=dumb cannot move its cursor, so it is treated like a file."""
    monkeypatch.setenv("TERM", "dumb")
    file = Terminal()
    with Progress(1, file=file) as progress:
        progress.update(1, loss=1.0)
    assert file.getvalue() == "step 1/1  loss 1.0000  ETA 0:00\n"


def test_other_ranks_show_nothing():
    """Disabled, nothing is written whatever is called."""
    for file in (io.StringIO(), Terminal()):
        with Progress(1, enabled=False, file=file) as progress:
            progress.update(1, loss=1.0)
            progress.note("hidden")
        assert file.getvalue() == ""


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "input/output error"),
        BrokenPipeError(errno.EPIPE, "broken pipe"),
        ValueError("I/O operation on closed file"),
    ],
    ids=["eio", "epipe", "closed"],
)
def test_a_console_that_breaks_is_counted_and_given_up(error, after, terminal):
    """Whichever write fails, on a bar or on lines, the loop goes on in silence."""
    clock, file = Clock(), Broken(error, after=after, terminal=terminal)
    with Progress(20, logging_steps=1, file=file, clock=clock) as progress:
        for step in range(1, 21):
            clock.now += 1.0
            progress.update(step, loss=1.0)
            progress.note("still here")
    assert progress.broken == 1
    # Rich's bar ends a failed drawing with up to two writes of its own.
    assert file.writes - after in ((1, 2, 3) if terminal else (1,))


def test_an_error_of_the_loop_passes_through():
    """The context manager closes the bar and hides no exception."""
    file = Terminal()
    with pytest.raises(ZeroDivisionError), Progress(10, file=file) as progress:
        progress.update(1, loss=1 / 0)
    assert progress.broken == 0


def test_a_reader_that_went_away_does_not_change_the_exit_code():
    """With stdout a pipe nobody reads, a whole process shows 200 lines, works on, and exits 0."""
    script = (
        "import sys\n"
        "from mprecipes.observe.progress import Progress\n"
        "with Progress(200, logging_steps=1) as progress:\n"
        "    for step in range(1, 201):\n"
        "        progress.update(step, loss=1.0)\n"
        "print('a line from somebody else')\n"
        "sys.stderr.write(f'broken={progress.broken}')\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=stdout, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 0
    assert done.stderr == b"broken=1"
