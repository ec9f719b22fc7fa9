# SPDX-License-Identifier: Apache-2.0
"""Pictures are drawn of what there is, in one colour an arm."""

import io
import math

from matplotlib.image import imread

from mprecipes.observe.figures import draw_all
from tests.stories import shown, story


def pixels(png: bytes):
    return imread(io.BytesIO(png), format="png")


def has_color(png: bytes, color: str) -> bool:
    """Whether some pixel is of this very colour."""
    wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return bool((abs(pixels(png)[:, :, :3] - wanted).max(axis=2) < 0.004).any())


def test_each_picture_there_is_something_to_show_in():
    """No loss scale in FP32 and BF16; all PNGs, wide enough to read."""
    pictures = draw_all(story())
    names = [picture.name for picture in pictures]
    assert names == ["differences", "loss", "gap", "grad_norm", "throughput", "memory"]
    for picture in pictures:
        assert picture.png.startswith(b"\x89PNG")
        assert pixels(picture.png).shape[1] == 1440
        assert picture.caption


def test_a_loss_scale_and_its_skips_are_drawn():
    """The red of the crosses is in the picture when a step was skipped, and not before."""
    scale = {step: 1024.0 if step < 20 else 512.0 for step in range(1, 41)}
    run = shown("fp16", 0, loss_scale=scale)
    (before,) = [p for p in draw_all(story(runs=[run])) if p.name == "loss_scale"]
    run = shown("fp16", 0, loss_scale=scale, skipped=(20,))
    (after,) = [p for p in draw_all(story(runs=[run])) if p.name == "loss_scale"]
    assert not has_color(before.png, "#b91c1c")
    assert has_color(after.png, "#b91c1c")


def test_runs_that_died_are_drawn_without_a_fuss():
    """No step, a loss that is not finite, nothing measured."""
    empty = {"train_loss": {}, "heldout": {}, "gap": {}, "grad_norm": {}}
    totals = dict.fromkeys(("tokens_per_second", "tokens_per_second_with_saves",
                            "peak_memory_bytes", "memory_of"))  # fmt: skip
    dead = shown("fp16", 0, **empty, **totals)
    assert draw_all(story(runs=[dead], judged=[], margin=None)) == []
    bad = shown("fp8", 0, train_loss={1: 5.0, 2: math.nan, 3: math.inf}, grad_norm={1: math.inf})
    assert "loss" in [picture.name for picture in draw_all(story(runs=[dead, bad]))]
