# SPDX-License-Identifier: Apache-2.0
"""Finds, for a comparison at equal memory, the largest batch per device with which each arm fits.

The global batch stays what it is, so every arm still makes the same updates of the same samples: a
larger batch per device means fewer micro-batches a step. Sizes are tried from the largest on, two
steps each in a run of its own, which is removed; out of memory means that the next is tried.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mprecipes.compute.divisors import divisors
from mprecipes.errors import ConfigError
from mprecipes.tools.compare_launches import Ended
from mprecipes.tools.compare_plan import Job

STEPS = 2  # the second one has the optimizer's state allocated
BATCH = "per_device_train_batch_size"


def sizes_to_try(options: dict[str, Any], num_processes: int) -> list[int]:
    """Gives the batches per device that divide the global batch, largest first.

    Args:
        options: of the recipe, as YAML and command line say them.

    Raises:
        ConfigError: the global batch is not said.
    """
    named = {name: str(options.get(name, "")) for name in (
        "global_batch_size", BATCH, "gradient_accumulation_steps")}  # fmt: skip
    if named["global_batch_size"].isdigit():
        whole = int(named["global_batch_size"])
    elif named[BATCH].isdigit() and named["gradient_accumulation_steps"].isdigit():
        whole = int(named[BATCH]) * int(named["gradient_accumulation_steps"]) * num_processes
    else:
        raise ConfigError(
            "no global_batch_size",
            expected="the sequences of an update, which every arm keeps",
            where="--batch largest",
            action="write --global_batch_size after the command's own options, or into the config",
        )
    return divisors(whole // num_processes)[::-1]


def batch_words(size: int) -> list[str]:
    """Gives the recipe's options of a batch per device; the accumulation follows from it."""
    return [f"--{BATCH}", str(size), "--gradient_accumulation_steps", "none"]


def largest_batch(job: Job, sizes: Sequence[int], run: Callable[[Job], Ended]) -> int:
    """Gives the largest of `sizes` with which an arm's job runs; blocks for the launches it takes.

    The smallest where none fits, and the one that was tried where a run ended for another reason:
    the arm's own runs then come to that end, which is their outcome.

    Args:
        job: of the arm, with any seed.
        run: launches one job and gives how it ended.
    """
    for size in sizes:
        folder = job.run.with_name(f"fit-{size}")
        words = [*job.words, *batch_words(size), "--max_steps", str(STEPS),
                 "--eval_steps", str(STEPS), "--output_dir", str(folder)]  # fmt: skip
        ended = run(replace(job, run=folder, words=words))
        shutil.rmtree(folder, ignore_errors=True)
        if ended.outcome != "out_of_memory":
            return size
    return sizes[-1]
