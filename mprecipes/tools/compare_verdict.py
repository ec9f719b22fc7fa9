# SPDX-License-Identifier: Apache-2.0
"""What the numbers of a comparison mean: statistics over seeds, and one verdict per arm.

Everything is paired by seed: an arm's run is compared with the FP32 run of its own seed, which had
the same initial weights and the same batches, and the differences are averaged over seeds. So the
spread between seeds, far larger than what a precision mode does, drops out.

Loss: two one-sided tests at 5 % each (TOST): an arm is equivalent when the whole 90 % confidence
interval of its mean difference lies within the margin on both sides. Not finding a difference is no
proof of equality; this is. Source: D. J. Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15
(1987) 657-680; D. Lakens, Social Psychological and Personality Science 8 (2017) 355-362.

Margin: the larger of 0.25 % of FP32's loss and the spread (standard deviation) of FP32 over seeds,
and never more than 1 % of FP32's loss. Sources: 0.25 %, below which DeepSeek-V3's FP8 training
stayed against BF16, "well within the acceptable range of training randomness" (arXiv 2412.19437,
section 3.3); 1 %, the quality that MLPerf Inference asks of reduced precision (arXiv 1911.02549).

Speed: the ratio of tokens per second, by seed, its interval taken of logarithms (a geometric mean).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

RELATIVE_MARGIN, LARGEST_MARGIN = 0.0025, 0.01
GAIN = 0.05  # faster or smaller by less is no reason to change a precision
MIN_SEEDS = 2  # with one there is no spread; below it nothing is concluded
# Quantile 0.95 of Student's t for 1 to 30 degrees of freedom.
# Source: NIST/SEMATECH e-Handbook of Statistical Methods, table 1.3.6.7.2.
_T95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
    1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
    1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 90 % confidence interval; low and high are None of one seed."""

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Finding:
    """What one aspect came to.

    Attributes:
        word: "equivalent", "worse", "better", "undecided"; "faster", "same", "slower"; "smaller",
            "larger"; "diverges".
        interval: of the difference in loss (nats), or of the ratio to FP32.
    """

    word: str
    interval: Interval | None
    text: str


@dataclass(frozen=True)
class Verdict:
    """One arm's verdict and what it rests on."""

    word: str
    reason: str
    quality: Finding | None = None
    speed: Finding | None = None
    memory: Finding | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def t95(degrees: int) -> float:
    """Gives the 0.95 quantile of Student's t; the normal quantile's expansion beyond the table."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    return 1.6449 + 1.5238 / degrees  # z + (z^3 + z) / 4n; Abramowitz and Stegun 26.7.5


def interval(values: Sequence[float]) -> Interval:
    """Gives the mean of one value per seed and its two-sided 90 % confidence interval."""
    mean = fmean(values)
    if len(values) < MIN_SEEDS:
        return Interval(mean, None, None, len(values))
    half = t95(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values))


def margin_of(reference: Sequence[float]) -> float:
    """Gives the margin of equivalence in nats, from FP32's final losses, one per seed."""
    loss = abs(fmean(reference))
    spread = stdev(reference) if len(reference) >= MIN_SEEDS else 0.0
    return min(max(RELATIVE_MARGIN * loss, spread), LARGEST_MARGIN * loss)


def judge_loss(differences: Sequence[float], margin: float) -> Finding:
    """Judges the differences of final loss to FP32, one per seed."""
    found = interval(differences)
    if found.low is None or found.high is None:
        return Finding("undecided", found, f"{found.mean:+.4f} nats, of one seed")
    text = (
        f"{found.mean:+.4f} nats, 90 % interval [{found.low:+.4f}, {found.high:+.4f}], "
        f"margin {margin:.4f}"
    )
    if -margin < found.low and found.high < margin:
        return Finding("equivalent", found, text)
    if found.low > 0:
        return Finding("worse", found, text)
    if found.high < 0:
        return Finding("better", found, text)
    return Finding("undecided", found, text)


def seeds_needed(differences: Sequence[float], margin: float) -> int | None:
    """Gives how many seeds would decide, if mean and spread stay as they are; None beyond 100."""
    mean, spread = abs(fmean(differences)), stdev(differences)
    for count in range(len(differences) + 1, 101):
        half = t95(count - 1) * spread / math.sqrt(count)
        if mean + half < margin or mean - half > 0:
            return count
    return None


def judge_ratio(
    ratios: Sequence[float], better: str, worse: str, *, less_is_better: bool = False
) -> Finding:
    """Judges ratios to FP32, one per seed, of something of which more, or less, is better."""
    logs = interval([math.log(ratio) for ratio in ratios])
    ends = [None if end is None else math.exp(end) for end in (logs.low, logs.high)]
    found = Interval(math.exp(logs.mean), ends[0], ends[1], logs.count)
    text = f"{found.mean:.2f}x"
    if found.low is None or found.high is None:
        return Finding("undecided", found, text + ", of one seed")
    text += f", 90 % interval [{found.low:.2f}, {found.high:.2f}]"
    more, less = (worse, better) if less_is_better else (better, worse)
    if found.mean >= 1 + GAIN and found.low > 1:
        return Finding(more, found, text)
    if found.mean <= 1 / (1 + GAIN) and found.high < 1:
        return Finding(less, found, text)
    return Finding("same", found, text)


def decide(
    quality: Finding,
    speed: Finding | None,
    memory: Finding | None,
    *,
    num_seeds: int,
    needed: int | None = None,
) -> Verdict:
    """Gives the verdict of an arm all of whose runs are complete and comparable.

    Args:
        quality: of the loss; "diverges" where a run did.
        memory: "smaller" where the peak is.
        num_seeds: seeds that both the arm and FP32 have.
        needed: how many would decide, for the message.
    """
    parts = (quality, speed, memory)
    if num_seeds < MIN_SEEDS:
        seen = "its one run diverged; " if quality.word == "diverges" else ""
        reason = f"{seen}one seed shows no spread: run at least {MIN_SEEDS}, better 3"
        return Verdict("not enough seeds", reason, *parts)
    if quality.word == "diverges":
        return Verdict("diverges", quality.text, *parts)
    gains = _named((speed, memory), ("faster", "smaller"))
    costs = _named((speed, memory), ("slower", "larger"))
    if quality.word == "undecided":
        more = f"about {needed} would decide" if needed else "more than 100 would be needed"
        return Verdict(
            "not enough seeds",
            f"the interval reaches beyond the margin and 0: {quality.text}; {more}",
            *parts,
        )
    if not gains:
        pairs = (("speed", speed), ("memory", memory))
        ratios = [f"{name} {finding.text}" for name, finding in pairs if finding is not None]
        reason = (
            f"neither faster nor smaller than FP32 by {GAIN:.0%} ({'; '.join(ratios)}); "
            f"loss {quality.word}: {quality.text}"
        )
        return Verdict("no gain", reason, *parts)
    reason = ", ".join(gains) + "".join(f", but {cost}" for cost in costs)
    word = "faster but worse" if quality.word == "worse" else "equivalent"
    return Verdict(word, f"{reason}; loss {quality.text}", *parts)


def _named(findings: Sequence[Finding | None], words: Sequence[str]) -> list[str]:
    return [f"{each.word} ({each.text})" for each in findings if each and each.word in words]
