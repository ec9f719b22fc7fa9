# SPDX-License-Identifier: Apache-2.0
"""Tokens per second as a resume compares them: windows of five steps, their median and spread.

The first step of a process (compilation, allocation, filling of caches) enters no window.
Evaluation and saves are left out of a step's seconds by who measures them. Windows do not overlap;
the newest 64 count.
"""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WINDOW_STEPS, FEWEST_WINDOWS, MOST_WINDOWS = 5, 3, 64
SPREADS = 3.0


class Rates:
    """Collects the steps of this process, observed ones in particular."""

    def __init__(self) -> None:
        self._steps = 0
        self._window: list[tuple[int, float]] = []
        self._windows: deque[float] = deque(maxlen=MOST_WINDOWS)
        self.observed: list[float] = []

    def add(self, tokens: int, seconds: float, *, observed: bool = False) -> None:
        """Notes one step; `observed` ones are kept by themselves too."""
        self._steps += 1
        if self._steps == 1 or seconds <= 0.0:
            return
        if observed:
            self.observed.append(tokens / seconds)
        self._window.append((tokens, seconds))
        if len(self._window) == WINDOW_STEPS:
            total = [sum(each) for each in zip(*self._window)]
            self._windows.append(total[0] / total[1])
            self._window = []

    def facts(self) -> dict[str, Any] | None:
        """Gives a manifest's `throughput`; None before three windows are full."""
        if len(self._windows) < FEWEST_WINDOWS:
            return None
        median = statistics.median(self._windows)
        mad = statistics.median(abs(each - median) for each in self._windows)
        return {
            "tokens_per_second": median,
            "mad": mad,
            "windows": len(self._windows),
            "window_steps": WINDOW_STEPS,
        }


@dataclass(frozen=True)
class RateVerdict:
    """Whether the observed steps are as fast as before.

    Attributes:
        is_slower: by more than `allowed`.
        found: median of the observed steps, tokens per second.
        missing: share of the stored rate that is missing; negative when faster.
        allowed: share that may be missing.
        source: where `allowed` comes from.
    """

    is_slower: bool
    found: float
    missing: float
    allowed: float
    source: str


def judge(
    observed: Sequence[float], stored: Mapping[str, Any] | None, tolerance: float
) -> RateVerdict | None:
    """Compares the median of the observed steps with what a manifest stored; None without either.

    Allowed is the larger of `tolerance` and three times the stored median absolute deviation of
    5-step windows. A faster run passes.
    """
    if not stored or not observed:
        return None
    before = stored["tokens_per_second"]
    spread = SPREADS * stored["mad"] / before
    allowed = max(tolerance, spread)
    source = f"throughput_tolerance {tolerance:g}"
    if spread > tolerance:
        source = f"{SPREADS:g} x the median absolute deviation of {stored['windows']} windows"
    found = statistics.median(observed)
    missing = 1.0 - found / before
    return RateVerdict(missing > allowed, found, missing, allowed, source)


def slow_ranks(seconds: Sequence[float], tolerance: float) -> list[str]:
    """Names the ranks whose own computing took longer than the median rank's by `tolerance`."""
    if len(seconds) < 2 or not all(seconds):
        return []
    middle = statistics.median_low(seconds)
    return [
        f"rank {rank}: {each:.4f} s, the median rank {middle:.4f} s ({each / middle - 1:+.0%})"
        for rank, each in enumerate(seconds)
        if each > middle * (1.0 + tolerance)
    ]
