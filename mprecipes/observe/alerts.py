# SPDX-License-Identifier: Apache-2.0
"""What a person should hear of: gradient norms that explode or vanish, and a loss that stays.

Pure judgements of one loss and one gradient norm an update. They change nothing in the training and
are in no checkpoint: a resumed process begins with empty windows. Each is told once and again only
after it was over.

- Gradient norm: `spike_updates` in a row above `grad_norm_factor` times the median of the
  `spike_window` updates before, or below the median divided by it. Judged when a quarter of the
  window is known.
- Plateau: of the newest `plateau_updates` losses, the mean of the second half is not below that of
  the first by `plateau_gain` of it, and the noise is too small to hide such a gain (two standard
  errors of the difference of the means, from the differences of neighbours, so that a slope is not
  taken for noise).
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Protocol


class Policy(Protocol):
    """What is used of the option `watch`."""

    @property
    def spike_window(self) -> int: ...
    @property
    def spike_updates(self) -> int: ...
    @property
    def grad_norm_factor(self) -> float | None: ...
    @property
    def plateau_updates(self) -> int | None: ...
    @property
    def plateau_gain(self) -> float: ...


class Alerts:
    """All alerts of one process."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._norms: deque[float] = deque(maxlen=policy.spike_window)
        self._losses: deque[float] = deque(maxlen=policy.plateau_updates or 1)
        self._running = {"gradient spike": 0, "gradient collapse": 0}
        self._on_plateau, self._since_judged = False, 0

    def judge(self, loss: float, grad_norm: float) -> list[tuple[str, str]]:
        """Takes in an update; gives (title, text) of what is to be told of it, usually []."""
        found = self._judge_norm(grad_norm) if self._policy.grad_norm_factor else []
        return found + (self._judge_loss(loss) if self._policy.plateau_updates else [])

    def _judge_norm(self, norm: float) -> list[tuple[str, str]]:
        if not math.isfinite(norm):
            return []  # told by what ends or turns back the run
        known, factor = len(self._norms), self._policy.grad_norm_factor or math.inf
        middle = median(self._norms) if known >= max(2, self._policy.spike_window // 4) else None
        self._norms.append(norm)
        if middle is None:
            return []
        told = []
        for title, is_so in (
            ("gradient spike", norm > middle * factor),
            ("gradient collapse", norm < middle / factor),
        ):
            self._running[title] = self._running[title] + 1 if is_so else 0
            if self._running[title] == self._policy.spike_updates:
                text = f"gradient norm {norm:.4g}, the median of {known} updates is {middle:.4g}"
                told.append((title, f"{text}, {self._running[title]} updates running"))
        return told

    def _judge_loss(self, loss: float) -> list[tuple[str, str]]:
        self._losses.append(loss)
        self._since_judged += 1
        size = self._policy.plateau_updates or 0
        if len(self._losses) < size or self._since_judged < max(1, size // 20):
            return []  # two passes over thousands of numbers: not after every update
        self._since_judged = 0
        half = size // 2
        losses = list(self._losses)
        first, second = losses[:half], losses[-half:]
        before, now = fmean(first), fmean(second)
        gain, wanted = before - now, self._policy.plateau_gain * abs(before)
        error = math.sqrt(_noise(first) / half + _noise(second) / half)
        was, self._on_plateau = self._on_plateau, gain + 2 * error < wanted
        if was or not self._on_plateau:
            return []
        text = f"mean {now:.6g} over {half} updates, {before:.6g} over those before"
        return [("loss plateau", f"{text}; a gain of {wanted:.3g} would have shown")]


def _noise(values: Sequence[float]) -> float:
    """The variance around a slowly changing mean. Source: von Neumann, 1941: half the mean square
    of successive differences."""
    return fmean((b - a) ** 2 for a, b in pairwise(values)) / 2
