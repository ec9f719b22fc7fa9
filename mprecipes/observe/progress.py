# SPDX-License-Identifier: Apache-2.0
"""What a person watching the console sees: a bar on a terminal, plain lines in a log file.

The console is a guest of the training: one that breaks (a closed pipe, a full disk under the log, a
terminal that went away) is counted and given up, and the run goes on.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TextIO

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

REFRESH_SECONDS = 0.1


class Progress:
    """Context manager that shows step, loss, tokens/s, time left and the newest checkpoint.

    The time left is this process's own mean seconds per step, evaluations and saves included, times
    the steps that are left; steps of earlier attempts count for nothing.

    Args:
        total_steps: last optimizer step of the run.
        start_step: steps done before this process.
        enabled: show anything at all; the main process only.
        logging_steps: steps between plain lines where there is no terminal.
        file: where to write; None for stdout.
        clock: monotonic seconds.

    Attributes:
        broken: writes the console refused; after the first one nothing more is shown.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        enabled: bool = True,
        logging_steps: int = 10,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps, self.start_step, self.broken = total_steps, start_step, 0
        self._enabled, self._logging_steps = enabled, logging_steps
        self._file = sys.stdout if file is None else file
        self._clock = clock
        self._started = clock()
        self._drawn = self._started
        self._bar: rich.progress.Progress | None = None

    def __enter__(self) -> "Progress":
        self._started = self._clock()
        self._guard(self._open)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._guard(self._bar.stop)
            self._bar = None

    def update(
        self,
        step: int,
        *,
        loss: float,
        tokens_per_second: float | None = None,
        learning_rate: float | None = None,
        last_checkpoint_step: int | None = None,
    ) -> None:
        """Shows the state after an optimizer step; in a log file, every `logging_steps` only.

        Args:
            loss: nats per token, shown even when it is not finite.
            last_checkpoint_step: newest published checkpoint, None for none yet.
        """
        parts = [f"loss {loss:.4f}"]
        if tokens_per_second is not None:
            parts.append(f"{tokens_per_second:,.0f} tokens/s")
        if learning_rate is not None:
            parts.append(f"lr {learning_rate:.3e}")
        parts.append(f"ETA {_duration(self._seconds_left(step))}")
        if last_checkpoint_step is not None:
            parts.append(f"checkpoint {last_checkpoint_step}")
        text = "  ".join(parts)
        if self._bar is not None:
            self._guard(lambda: self._draw(step, text))
        elif step % self._logging_steps == 0 or step >= self.total_steps:
            self._guard(lambda: self._line(f"step {step}/{self.total_steps}  {text}"))

    def note(self, text: str) -> None:
        """Shows a line of its own, above the bar."""
        bar = self._bar
        if bar is not None:
            self._guard(lambda: bar.console.print(Text(text)))
        else:
            self._guard(lambda: self._line(text))

    def _open(self) -> None:
        console = _Console(file=self._file)
        if not self._file.isatty() or console.is_dumb_terminal:
            return
        bar = rich.progress.Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            # Drawn by update() alone: rich's own refresh thread would die unseen with the console.
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        bar.add_task("", total=self.total_steps, completed=self.start_step, state="")
        bar.start()
        self._bar = bar

    def _draw(self, step: int, text: str) -> None:
        if self._bar is None:
            return
        self._bar.update(self._bar.task_ids[0], completed=step, state=text)
        if self._clock() - self._drawn >= REFRESH_SECONDS or step >= self.total_steps:
            self._bar.refresh()
            self._drawn = self._clock()

    def _line(self, text: str) -> None:
        self._file.write(text + "\n")
        self._file.flush()

    def _guard(self, show: Callable[[], object]) -> None:
        if not self._enabled or self.broken:
            return
        try:
            show()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.broken += 1
            self._bar = None
            # What is still buffered would fail again at exit and turn the exit code into 120.
            # Source: Python library reference, signal, "Note on SIGPIPE".
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._file.fileno())
                os.close(null)

    def _seconds_left(self, step: int) -> float | None:
        done = step - self.start_step
        if done <= 0:
            return None
        return (self._clock() - self._started) / done * max(0, self.total_steps - step)


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Rich ends the process here; this console reports instead."""
        raise BrokenPipeError


def _duration(seconds: float | None) -> str:
    """Gives `h:mm:ss`, or `m:ss` below an hour; `-` for not known yet."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
