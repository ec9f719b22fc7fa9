# SPDX-License-Identifier: Apache-2.0
"""What loss and gradient norm may be where no first pass says what they were: a band.

From the newest up to 32 steps before the save, at least 8. Loss: a straight line is fitted (least
squares), r are its residuals; the band of step s reaches from min(line(s), median) - h to
max(line(s), median) + h with h = max(6 x 1.4826 x MAD(r), 5 % of the median). Gradient norm: the
same in its logarithm without a line, h = max(6 x 1.4826 x MAD, log 2). Judged is the median, over
the observed steps, of how far each is outside.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mprecipes.resume.journal import StepRecord

FEWEST, MOST = 8, 32
_SPREADS, _SIGMA = 6.0, 1.4826
FORMULA = (
    "line through the losses of {n} steps before the save, and their median, +- max(6 x 1.4826 x "
    "MAD of the residuals, 5 %); gradient norm: median x/ exp(max(6 x 1.4826 x MAD of logs, log 2))"
)


@dataclass(frozen=True)
class Band:
    """The band that the steps before a save allow the ones after it."""

    num_steps: int
    line: tuple[float, float]
    median: float
    half_width: float
    log_norm: float
    log_half_width: float

    def loss(self, step: int) -> tuple[float, float]:
        """Gives the lowest and highest loss of a step."""
        centres = self.line[0] + self.line[1] * step, self.median
        return min(centres) - self.half_width, max(centres) + self.half_width

    @property
    def grad_norm(self) -> tuple[float, float]:
        """The lowest and highest gradient norm."""
        low, high = self.log_norm - self.log_half_width, self.log_norm + self.log_half_width
        return math.exp(low), math.exp(high)

    @property
    def formula(self) -> str:
        """How it was made, with the number of steps."""
        return FORMULA.format(n=self.num_steps)


def make_band(before: Sequence[StepRecord]) -> Band | None:
    """Gives the band of the steps before a save, oldest first; None of fewer than 8."""
    records = [r for r in before if math.isfinite(r.loss) and r.grad_norm > 0][-MOST:]
    if len(records) < FEWEST:
        return None
    steps, losses = [float(r.step) for r in records], [r.loss for r in records]
    slope, start = statistics.linear_regression(steps, losses)
    residuals = [loss - start - slope * step for step, loss in zip(steps, losses)]
    median = statistics.median(losses)
    logs = [math.log(r.grad_norm) for r in records]
    return Band(
        len(records),
        (start, slope),
        median,
        max(_SPREADS * _SIGMA * _mad(residuals), 0.05 * abs(median)),
        statistics.median(logs),
        max(_SPREADS * _SIGMA * _mad(logs), math.log(2.0)),
    )


def outside(band: Band, observed: Sequence[StepRecord]) -> list[str]:
    """Gives what is outside of the band in the median of the observed steps; [] for nothing."""
    found = []
    for key, limits in (
        ("loss", [band.loss(record.step) for record in observed]),
        ("grad_norm", [band.grad_norm] * len(observed)),
    ):
        values = [getattr(record, key) for record in observed]
        over = statistics.median(max(v - high, low - v) for v, (low, high) in zip(values, limits))
        if over > 0:
            worst = statistics.median(values)
            low, high = limits[len(limits) // 2]
            found.append(f"{key} {worst:.6g} (median), outside {low:.6g} to {high:.6g}")
    return found


def _mad(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)
