# SPDX-License-Identifier: Apache-2.0
"""What watching the numbers costs: its share of a process's CPU time, in steps of the recipe.

    python -m benchmarks.numerics --steps 40

The watch's own methods and hooks are timed where they are called, so that other load on the machine
does not enter, and the median of the steps is given; a Llama of 1.1 million parameters, bf16, 512
tokens a step. The norms of all gradients are what costs: the first to read them pays for the cache,
and clipping, which reads them next, is faster by that. This is measured on steps with and without
norms in turn, and taken off.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from benchmarks.modes import MODEL
from mprecipes.compute.culprits import BlockWatch, GradientNorms
from mprecipes.compute.watching import NumericsWatch
from tests.inprocess import train


class Stopwatch:
    """Sums the CPU time of calls, those made inside others counted once."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, self._depth = time.process_time(), self._depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.process_time() - began

        return timed


def options(folder: Path, steps: int, every: int | None) -> list[str]:
    """Gives the recipe's command line."""
    values = {
        "dataset": "stdlib", "seq_length": 128, "eval_fraction": "none", "precision": "bf16",
        "model_config": json.dumps(MODEL), "per_device_train_batch_size": 4,
        "max_steps": steps, "save_steps": 10 * steps, "output_dir": folder,
        "numerics": json.dumps({"numerics_steps": every}),
    }  # fmt: skip
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def saved_by_clipping(steps: int, folder: Path) -> float:
    """Gives the CPU seconds by which clipping is faster where norms were taken before it."""
    take, clip = GradientNorms.take, Accelerator.clip_grad_norm_
    spent: dict[bool, list[float]] = {True: [], False: []}
    turns = [0]

    def sometimes(norms: GradientNorms) -> None:
        turns[0] += 1
        if turns[0] % 2:
            take(norms)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = clip(*args, **kwargs)
        spent[turns[0] % 2 == 1].append(time.process_time() - began)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientNorms, "take", sometimes)
        patch.setattr(Accelerator, "clip_grad_norm_", timed)
        done = train(options(folder, steps, None))
    if done.error is not None:
        raise done.error
    return statistics.median(spent[False]) - statistics.median(spent[True])


def share(steps: int, every: int | None, folder: Path) -> tuple[float, float]:
    """Gives CPU seconds of a step, the watch's and all.

    Steps that are measured and steps that are not have a median each, weighed by how many they are.
    """
    watch = Stopwatch()
    at: list[tuple[float, float]] = []  # the watch's seconds, and all, as each step begins
    before = {
        name: getattr(NumericsWatch, name) for name in ("after_backward", "judge", "measured")
    }
    hook = BlockWatch._hook
    try:
        for name, method in before.items():
            setattr(NumericsWatch, name, watch.around(method))
        BlockWatch._hook = lambda self, name: watch.around(hook(self, name))  # type: ignore[method-assign]

        def change(recipe: Any) -> None:
            compute_loss = recipe.compute_loss

            def first(model: Any, batch: Any) -> Any:
                at.append((watch.seconds, time.process_time()))
                return compute_loss(model, batch)

            recipe.compute_loss = first

        done = train(options(folder, steps, every), change)
        if done.error is not None:
            raise done.error
        mine, whole = ([b - a for a, b in pairwise(column)] for column in zip(*at, strict=True))
        due = [n for n in range(len(mine)) if every is not None and (n + 1) % every == 0]
        kinds = [[n for n in range(len(mine)) if n not in due], due]

        def weighed(seconds: list[float]) -> float:
            medians = [len(ns) * statistics.median(seconds[n] for n in ns) for ns in kinds if ns]
            return sum(medians) / len(seconds)

        return weighed(mine), weighed(whole)
    finally:
        for name, method in before.items():
            setattr(NumericsWatch, name, method)
        BlockWatch._hook = hook  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        saved = saved_by_clipping(2 * steps, Path(folder) / "clipping")
        print(f"clipping is {1e6 * saved:.0f} us faster after the norms of the watch")
        for every in (None, 20, 1):
            mine, whole = share(steps, every, Path(folder) / str(every))
            each = "never" if every is None else f"every {every} steps"
            print(
                f"measured {each}: {1000 * (mine - saved):.2f} of {1000 * whole:.1f} ms a step, "
                f"{100 * (mine - saved) / whole:.2f} % (its own calls: {100 * mine / whole:.2f} %)"
            )


if __name__ == "__main__":
    main()
