# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report: PNG bytes, drawn without a display and without pyplot's global state.

One colour per arm in all of them, FP32 in ink; thin lines are single runs, bold ones the mean over
seeds. A picture of which there is nothing to show is left out.
"""

import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from mprecipes.observe.curves import (
    BAD,
    BAND,
    GRID,
    INK,
    MODE_COLORS,
    MUTED,
    by_group,
    colors_of,
    mean_curve,
    smoothed,
)
from mprecipes.observe.story import MEMORY_OF, Judged, ShownRun, Story

DPI = 144
GIB = 1 << 30
LONGEST = 40  # characters of a name in a picture
WIDE = 20  # margins: a gap beyond is drawn on a logarithmic scale outside the margin


@dataclass(frozen=True)
class Picture:
    """One picture: its file name without suffix, what it shows in words, and its PNG."""

    name: str
    title: str
    caption: str
    png: bytes


def draw_all(story: Story) -> list[Picture]:
    """Draws every picture that there is something to show in, in the order of the story."""
    colors = colors_of(story.runs)
    drawn = [
        _differences(story, colors),
        _loss(story, colors),
        _gap(story, colors),
        _grad_norm(story, colors),
        _loss_scale(story, colors),
        _throughput(story, colors),
        _memory(story, colors),
    ]
    return [picture for picture in drawn if picture is not None]


# What there is in all pictures


def _figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color("#c3c9d4")
        each.tick_params(colors=MUTED, labelsize=9)
        each.grid(axis="y", color=GRID, linewidth=0.9)
        each.set_axisbelow(True)
    return figure, axes


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # drawn as an empty box
        figure.savefig(file, format="png", metadata={"Software": "mprecipes report"})
    return file.getvalue()


def _name(group: str) -> str:
    """A group's name as matplotlib draws it: no formula, and not longer than the picture."""
    short = group if len(group) <= LONGEST else f"{group[: LONGEST - 3]}..."
    return short.replace("$", r"\$")


def _steps_axis(axes: Any, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("optimizer step", color=INK, fontsize=9.5)
    axes.set_title(label, color=INK, fontsize=10.5, loc="left", weight="bold")
    axes.margins(x=0.02)


def _legend(axes: Any, *, above: bool = True) -> None:
    """Names the curves: in a row above the axes, where it hides none of them, or inside."""
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 6, "borderpad": 0.2,
             "columnspacing": 1.4, "handlelength": 1.6} if above else {"loc": "best"}  # fmt: skip
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, **place)


def _plain_log_axis(axes: Any) -> None:
    """A logarithmic axis whose numbers read 0.5 and 20, not powers of ten."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # more would be written over each other
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis(lambda value, _: f"{value:g}")
    axes.tick_params(axis="y", which="minor", colors=MUTED, labelsize=9)


def _curves(
    axes: Any,
    runs: Sequence[ShownRun],
    colors: Mapping[str, str],
    of: Callable[[ShownRun], Mapping[int, float]],
    *,
    smooth: bool = False,
    markers: bool = False,
) -> bool:
    """Draws each run thin and each group's mean bold; gives whether there was anything."""
    something = False
    for group, members in by_group(runs).items():
        curves = [dict(of(run)) for run in members if of(run)]
        if not curves:
            continue
        something = True
        if len(curves) > 1 or smooth:
            for curve in curves:
                axes.plot(*_xy(curve), color=colors[group], linewidth=0.9, alpha=0.28, zorder=2)
        mean = mean_curve(curves)
        axes.plot(
            *_xy(smoothed(mean) if smooth else mean), color=colors[group], label=_name(group),
            zorder=3, linewidth=2.0, marker="o" if markers and len(mean) <= 40 else None,
            markersize=4.5, solid_capstyle="round",
        )  # fmt: skip
    return something


def _xy(curve: Mapping[int, float]) -> tuple[list[int], list[float]]:
    items = sorted(curve.items())
    return [step for step, _ in items], [value for _, value in items]


# One function a picture


def _differences(story: Story, colors: Mapping[str, str]) -> Picture | None:
    """Every arm's difference to FP32 with its interval, against the margin: the verdict at once."""
    shown: list[Judged] = [each for each in story.judged if each.mean is not None]
    if not shown or story.margin is None:
        return None
    figure, (axes,) = _figure(10, 1.3 + 0.5 * len(shown))
    axes.axvspan(-story.margin, story.margin, color=BAND, alpha=0.10, linewidth=0, zorder=0)
    axes.axvline(0, color=MODE_COLORS["fp32"], linewidth=1.4, zorder=1)
    for row, each in enumerate(reversed(shown)):
        color = colors.get(each.group, MUTED)
        if each.low is not None and each.high is not None:
            axes.plot([each.low, each.high], [row, row], color=color, linewidth=5, alpha=0.45,
                      solid_capstyle="round", zorder=2)  # fmt: skip
        axes.plot(each.mean, row, "o", color=color, markersize=8, zorder=3)
    axes.set_yticks(range(len(shown)), [_name(each.group) for each in reversed(shown)], color=INK)
    axes.set_ylim(-0.7, len(shown) - 0.3)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID)
    ends = [abs(v) for e in shown for v in (e.low, e.mean, e.high) if v is not None]
    reach = 1.15 * max([story.margin, *filter(math.isfinite, ends)])
    axes.set_xlim(-reach, reach)
    axes.set_xlabel("final loss minus FP32's, nats   (left: lower than FP32)", color=INK,
                    fontsize=9.5)  # fmt: skip
    axes.set_title(f"shaded: margin of equivalence, {story.margin:.4f} nats", color=MUTED,
                   fontsize=9.5, loc="right")  # fmt: skip
    caption = (
        "Mean over seeds of the difference in final loss, paired by seed, with its 90 % confidence "
        "interval. An arm is equivalent only when its whole interval lies in the shaded margin."
    )
    return Picture("differences", "Difference to FP32", caption, _png(figure))


def _loss(story: Story, colors: Mapping[str, str]) -> Picture | None:
    has_heldout = any(run.heldout for run in story.runs)
    figure, axes = _figure(10, 4.2, 2 if has_heldout else 1)
    if not _curves(axes[0], story.runs, colors, lambda run: run.train_loss, smooth=True):
        return None
    _steps_axis(axes[0], "Training loss, nats per token")
    if has_heldout:
        _curves(axes[1], story.runs, colors, lambda run: run.heldout, markers=True)
        _steps_axis(axes[1], "Held-out loss, nats per token")
    _legend(axes[-1], above=False)
    caption = "Thin: single runs. Bold: mean over seeds; of the training loss, smoothed."
    return Picture("loss", "Loss", caption, _png(figure))


def _gap(story: Story, colors: Mapping[str, str]) -> Picture | None:
    runs = [run for run in story.runs if any(run.gap.values())]
    if not runs:
        return None
    figure, (axes,) = _figure(10, 3.6)
    if story.margin is not None:
        axes.axhspan(-story.margin, story.margin, color=BAND, alpha=0.10, linewidth=0, zorder=0,
                     label="margin at the end")  # fmt: skip
    axes.axhline(0, color=MODE_COLORS["fp32"], linewidth=1.4, zorder=1)
    _curves(axes, runs, colors, lambda run: run.gap, markers=True)
    widest = max(abs(value) for run in runs for value in run.gap.values() if value == value)
    if story.margin and widest > WIDE * story.margin:  # one that diverges must not flatten the rest
        axes.set_yscale("symlog", linthresh=story.margin)
    _steps_axis(axes, "Loss minus FP32's of the same seed, nats")
    _legend(axes)
    caption = "Zero is FP32. What matters is where a curve ends, and whether it drifts."
    return Picture("gap", "Gap to FP32", caption, _png(figure))


def _grad_norm(story: Story, colors: Mapping[str, str]) -> Picture | None:
    figure, (axes,) = _figure(10, 3.6)
    if not _curves(axes, story.runs, colors, lambda run: _finite(run.grad_norm), smooth=True):
        return None
    _plain_log_axis(axes)
    _steps_axis(axes, "Gradient norm before clipping")
    _legend(axes)
    caption = "A norm that sinks below FP32's is the mark of gradients lost to underflow."
    return Picture("grad_norm", "Gradient norm", caption, _png(figure))


def _finite(curve: Mapping[int, float]) -> dict[int, float]:
    return {step: value for step, value in curve.items() if math.isfinite(value) and value > 0}


def _loss_scale(story: Story, colors: Mapping[str, str]) -> Picture | None:
    runs = [run for run in story.runs if run.loss_scale]
    if not runs:
        return None
    figure, (axes,) = _figure(10, 3.2)
    for index, run in enumerate(runs):
        steps, values = _xy(run.loss_scale)
        first = run.group not in {before.group for before in runs[:index]}
        axes.step(steps, values, where="post", color=colors[run.group], linewidth=1.6, alpha=0.8,
                  label=_name(run.group) if first else None, zorder=3)  # fmt: skip
        skipped = [step for step in run.skipped if step in run.loss_scale]
        axes.plot(skipped, [run.loss_scale[step] for step in skipped], "x", color=BAD, zorder=4,
                  markersize=7, markeredgewidth=2)  # fmt: skip
    if any(run.skipped for run in runs):
        axes.plot([], [], "x", color=BAD, markersize=7, markeredgewidth=2, label="skipped step")
    axes.set_yscale("log", base=2)
    _steps_axis(axes, "Loss scale")
    _legend(axes)
    caption = "Crosses: steps whose gradient overflowed, so that the update was skipped."
    return Picture("loss_scale", "Loss scale", caption, _png(figure))


def _bars(
    story: Story,
    colors: Mapping[str, str],
    of: Callable[[ShownRun], float | None],
    text: Callable[[float], str],
    ratio_of: Callable[[Judged], float | None],
    hollow: Callable[[ShownRun], float | None] | None = None,
) -> Any | None:
    """Horizontal bars of group means with a dot per run; a hollow bar behind where given.

    The ratio beside a bar is the one that its arm was judged by; without an arm there is none.
    """
    ratios = {each.group: ratio_of(each) for each in story.judged}
    rows = [
        (group, values, [v for run in members if hollow and (v := hollow(run)) is not None])
        for group, members in by_group(story.runs).items()
        if (values := [v for run in members if (v := of(run)) is not None])
    ]
    if not rows:
        return None
    figure, (axes,) = _figure(10, 0.9 + 0.55 * len(rows))
    reach = max(value for _, values, more in rows for value in (*values, *more))
    for row, (group, values, more) in enumerate(reversed(rows)):
        if more:
            axes.barh(row, fmean(more), height=0.62, color="white", edgecolor=colors[group],
                      linewidth=1.3, linestyle=(0, (3, 2)), zorder=1)  # fmt: skip
        axes.barh(row, fmean(values), height=0.62, color=colors[group], alpha=0.85, zorder=2)
        axes.plot(values, [row] * len(values), "o", color="white", markeredgecolor=INK, zorder=3,
                  markersize=4.5, markeredgewidth=0.9)  # fmt: skip
        ratio = f"   {ratios[group]:.2f}x FP32" if ratios.get(group) else ""
        axes.text(max(*values, *more, fmean(values)) + 0.012 * reach, row,
                  text(fmean(values)) + ratio, va="center", color=INK, fontsize=9.5)  # fmt: skip
    axes.set_yticks(range(len(rows)), [_name(group) for group, _, _ in reversed(rows)], color=INK)
    axes.set_xlim(0, reach * 1.28)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID)
    return figure


def _throughput(story: Story, colors: Mapping[str, str]) -> Picture | None:
    figure = _bars(
        story,
        colors,
        lambda run: run.tokens_per_second_with_saves,
        lambda value: f"{value:,.0f} tokens/s",
        lambda judged: judged.speed,
        hollow=lambda run: run.tokens_per_second,
    )
    if figure is None:
        return None
    caption = (
        "End to end with saves (filled), and the median of windows without them (dashed outline); "
        "dots are single runs. Warm-up steps are left out of both."
    )
    return Picture("throughput", "Throughput", caption, _png(figure))


def _memory(story: Story, colors: Mapping[str, str]) -> Picture | None:
    figure = _bars(
        story,
        colors,
        lambda run: None if run.peak_memory_bytes is None else run.peak_memory_bytes / GIB,
        lambda value: f"{value:.2f} GiB",
        lambda judged: judged.memory,
    )
    if figure is None:
        return None
    kinds = sorted({run.memory_of for run in story.runs if run.memory_of})
    caption = f"Peak over the run of {' and of '.join(MEMORY_OF[kind] for kind in kinds)}."
    return Picture("memory", "Peak memory", caption, _png(figure))
