# SPDX-License-Identifier: Apache-2.0
"""Whether the loss has left its course: a pure judgement of one number an update.

An update's loss is high when it lies above `median + mads x MAD` of the `window` updates before it
(MAD: the median of the distances to the median). One high loss is noise; `updates` of them in a row
are a spike. A loss or gradient norm that is not finite is one at once. Nothing is high until a
quarter of the window is known. Robust on purpose: a mean and a standard deviation would be drawn
after the spike. A loss that repeats itself exactly has a MAD of 0, so a thousandth of the median
is the least that counts.
"""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

LEAST_MAD = 1e-3  # of the median


class SpikeDetector:
    """The losses of the newest updates, and how many of the last were high.

    Args:
        window: updates that are remembered.
        mads: how many MADs above the median a loss is high.
        updates: high losses in a row that are a spike.
        state: of `state`, to go on where another one was; its losses beyond the window are left
            out.

    Attributes:
        since: (step, first sample) of the first of the high losses in a row; None without any.
        running: their number.
    """

    def __init__(
        self, window: int, mads: float, updates: int, state: Mapping[str, Any] | None = None
    ) -> None:
        self._mads, self._updates, self._least = mads, updates, max(2, window // 4)
        state = state or {}
        self._losses: deque[float] = deque(state.get("losses", ()), maxlen=window)
        self.running: int = state.get("running", 0)
        since = state.get("since")
        self.since: tuple[int, int] | None = (since[0], since[1]) if since else None

    @property
    def limit(self) -> float:
        """Above it the next loss is high; infinite while too few are known."""
        if len(self._losses) < self._least:
            return math.inf
        middle, mad = self._spread()
        return middle + self._mads * max(mad, LEAST_MAD * abs(middle))

    def judge(self, step: int, first_sample: int, loss: float, grad_norm: float) -> str | None:
        """Takes in one update that is about to be made; gives what is wrong when it is a spike."""
        limit, is_finite = self.limit, math.isfinite(loss) and math.isfinite(grad_norm)
        if is_finite and loss <= limit:
            self.since, self.running = None, 0
            self._losses.append(loss)
            return None
        self.since = self.since or (step, first_sample)
        self.running += 1
        if not is_finite:
            return f"loss {loss}, gradient norm {grad_norm}"
        if self.running >= self._updates:
            middle, mad = self._spread()
            return (
                f"loss {loss:.6g} is above {limit:.6g} (median {middle:.6g} + {self._mads:g} x MAD "
                f"{mad:.6g} of {len(self._losses)} updates) for {self.running} updates running"
            )
        self._losses.append(loss)
        return None

    def state(self) -> dict[str, Any]:
        """Gives everything a later judgement follows from, as JSON values; all finite."""
        return {
            "losses": list(self._losses),
            "running": self.running,
            "since": list(self.since) if self.since else None,
        }

    def _spread(self) -> tuple[float, float]:
        middle = median(self._losses)
        return middle, median(abs(loss - middle) for loss in self._losses)
