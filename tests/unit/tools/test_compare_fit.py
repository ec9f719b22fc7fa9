# SPDX-License-Identifier: Apache-2.0
"""The largest batch that fits is found from above, and the global batch stays what it is."""

from pathlib import Path

import pytest

from mprecipes.errors import ConfigError
from mprecipes.tools.compare_fit import batch_words, largest_batch, sizes_to_try
from mprecipes.tools.compare_launches import Ended
from mprecipes.tools.compare_plan import ArmPlan, Job

JOB = Job(ArmPlan("bf16", "bf16"), 0, Path("out/bf16/seed-0"), ["--precision", "bf16"])


def trying(fits: int, otherwise: str = "out_of_memory"):
    """Gives a launcher of jobs, and the list of sizes it was asked for."""
    tried: list[int] = []

    def run(job):
        tried.append(int(job.words[job.words.index("--per_device_train_batch_size") + 1]))
        return Ended(job, "finished" if tried[-1] <= fits else otherwise)

    return run, tried


def test_from_the_largest_on():
    """8 and 4 do not fit, 2 does; 1 is not tried."""
    run, tried = trying(fits=2)
    assert largest_batch(JOB, [8, 4, 2, 1], run) == 2
    assert tried == [8, 4, 2]


def test_none_that_fits_is_left_to_the_run_itself():
    """The smallest; and where it is refused for another reason, no more is tried."""
    assert largest_batch(JOB, [4, 2, 1], trying(fits=0)[0]) == 1
    run, tried = trying(fits=0, otherwise="refused")
    assert largest_batch(JOB, [4, 2, 1], run) == 4
    assert tried == [4]


@pytest.mark.parametrize(
    ("options", "processes", "sizes"),
    [
        ({"global_batch_size": 8}, 1, [8, 4, 2, 1]),
        ({"global_batch_size": "12"}, 2, [6, 3, 2, 1]),
        ({"global_batch_size": 2 * (10**12 + 39)}, 2, [10**12 + 39, 1]),  # a prime, times 2
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}, 4, [6, 3, 2, 1]),
    ],
)
def test_sizes_divide_the_global_batch(options, processes, sizes):
    """Over all processes, largest first."""
    assert sizes_to_try(options, processes) == sizes


def test_an_unknown_global_batch_is_refused():
    """Otherwise each arm would train on another one."""
    with pytest.raises(ConfigError) as refused:
        sizes_to_try({"per_device_train_batch_size": 2}, 1)
    assert refused.value.found == "no global_batch_size"
    assert "every arm keeps" in refused.value.expected
    assert refused.value.where == "--batch largest"
    assert "--global_batch_size" in refused.value.action


def test_the_accumulation_follows_from_the_batch():
    """It is left to the recipe."""
    assert batch_words(4) == [
        "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "none",
    ]  # fmt: skip
