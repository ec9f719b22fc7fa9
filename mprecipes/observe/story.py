# SPDX-License-Identifier: Apache-2.0
"""What a report tells, as plain values: filled by whoever knows runs, drawn and written here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MEMORY_OF = {  # what a peak is of, by `ShownRun.memory_of`
    "device": "what torch's allocator held of the main process's GPU",
    "host": "the main process's resident memory, as it has no GPU",
}
Tone = Literal["", "good", "bad", "warn", "muted"]


@dataclass(frozen=True)
class ShownRun:
    """One run's curves, by optimizer step, and its totals.

    Attributes:
        group: the arm; runs of one group have one colour and are averaged over their seeds.
        mode: its precision mode, which decides the colour.
        heldout: held-out loss, nats per token.
        gap: held-out (or smoothed training) loss minus that of FP32 with the same seed.
        skipped: steps whose update was not applied.
        memory_of: what the peak is of, a key of MEMORY_OF.
    """

    label: str
    group: str
    mode: str
    seed: int | None
    train_loss: Mapping[int, float]
    heldout: Mapping[int, float]
    gap: Mapping[int, float]
    grad_norm: Mapping[int, float]
    loss_scale: Mapping[int, float]
    skipped: tuple[int, ...] = ()
    tokens_per_second: float | None = None
    tokens_per_second_with_saves: float | None = None
    peak_memory_bytes: int | None = None
    memory_of: str | None = None


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: as it is shown.
        value: the number behind it, exactly as in `report.json`; None for a text.
        tone: how it is coloured.
    """

    text: str
    value: float | None = None
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """A table; `note` stands under it.

    Attributes:
        name: its id in the page.
        leads: it stands before the pictures.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]
    note: str = ""
    leads: bool = False


@dataclass(frozen=True)
class Judged:
    """One arm's verdict, as a card.

    Attributes:
        low, mean, high: difference of the loss to FP32 with its interval, for the picture.
        speed, memory: ratios to FP32, for the bars.
    """

    group: str
    mode: str
    word: str
    reason: str
    tone: Tone
    low: float | None = None
    mean: float | None = None
    high: float | None = None
    speed: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Story:
    """A whole report.

    Attributes:
        facts: lines under the title, such as the recipe, the data and the device.
        margin: margin of equivalence in nats, drawn as a band; None where nothing is judged.
        method: paragraphs that say how it was measured and judged.
        data: everything above as JSON, written beside the page and into it.
    """

    title: str
    facts: list[str]
    judged: list[Judged]
    runs: list[ShownRun]
    tables: list[Table]
    method: list[str]
    margin: float | None = None
    data: dict[str, Any] = field(default_factory=dict)
