# SPDX-License-Identifier: Apache-2.0
"""Sharing a global batch, and collectives of one process."""

import threading
from pathlib import Path

import pytest

from mprecipes.compute.ranks import Ranks, plan_batches
from mprecipes.errors import ConfigError


def test_global_batch_is_the_product_of_its_three_parts():
    """Micro-batch 4 x accumulation 2 x 2 processes is 16 sequences a step."""
    plan = plan_batches(Ranks(1, 2), micro_batch=4, accumulation=2, global_batch=None)
    assert (plan.global_batch, plan.rank) == (16, 1)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_accumulation_follows_from_the_global_batch(world_size, accumulation):
    """The same global batch of 32 is kept on any number of processes that divides it."""
    plan = plan_batches(Ranks(0, world_size), micro_batch=4, accumulation=None, global_batch=32)
    assert plan.accumulation == accumulation
    assert plan.global_batch == 32


def test_sizes_that_do_not_divide_list_what_would():
    """A global batch of 12 on 2 processes with micro-batch 4 names the micro-batches that fit."""
    with pytest.raises(ConfigError) as caught:
        plan_batches(Ranks(0, 2), micro_batch=4, accumulation=None, global_batch=12)
    error = caught.value
    assert "global_batch_size 12" in error.found and "processes 2" in error.found
    assert "a multiple of 8" in error.expected and "1, 2, 3, 6" in error.expected
    assert error.where == "global_batch_size"
    assert "--per_device_train_batch_size" in error.action


def test_a_contradicting_accumulation_is_refused():
    """32 sequences are not 4 x 2 x 2; the micro-batch that would make them so is 8."""
    with pytest.raises(ConfigError) as caught:
        plan_batches(Ranks(0, 2), micro_batch=4, accumulation=2, global_batch=32)
    assert "that fits: 8" in caught.value.expected


@pytest.mark.parametrize(
    ("global_batch", "accumulation", "expected"),
    [
        (12, 5, "none with these other numbers"),
        (13, None, "none with these other numbers"),
        (2 * 73 * 137, None, "1, 73, 137, 10001"),
        (2 * (10**12 + 1), 7, "none with these other numbers"),
        (2 * (10**12 + 39), None, "1, 1000000000039"),
    ],
)
def test_the_advice_takes_no_longer_for_a_large_batch(global_batch, accumulation, expected):
    """On 2 processes; numbers are not counted up to the global batch to find what divides it."""
    with pytest.raises(ConfigError) as caught:
        plan_batches(
            Ranks(0, 2), micro_batch=4, accumulation=accumulation, global_batch=global_batch
        )
    assert caught.value.expected.endswith(f"that fits: {expected}")


def test_the_advice_is_exact_where_a_float_cannot_hold_it():
    """Twice 10^400 is 5 x 2 processes x 2 x 10^399, and a multiple of 8 itself."""
    with pytest.raises(ConfigError) as caught:
        plan_batches(Ranks(0, 2), micro_batch=4, accumulation=5, global_batch=2 * 10**400)
    assert caught.value.expected.endswith(f"that fits: 2{'0' * 399}")
    assert caught.value.action.endswith(f"--global_batch_size to 2{'0' * 400}")


def test_the_advice_names_the_nearest_of_many():
    """963,761,198,400 has 6,720 divisors; 24 around the one that was asked for are listed."""
    with pytest.raises(ConfigError) as caught:
        plan_batches(Ranks(), micro_batch=29, accumulation=None, global_batch=963_761_198_400)
    assert ", 28, 30, " in caught.value.expected
    assert caught.value.expected.endswith(" and 6696 farther ones")


def test_one_process_needs_no_process_group():
    """Every collective of a single process gives back its own value."""
    ranks = Ranks()
    assert (ranks.share("a"), ranks.gather(3), ranks.sum([1.5, 2.0])) == ("a", [3], [1.5, 2.0])
    ranks.barrier()


def test_each_rank_has_one_writer():
    """Rank 0 for all, or the first rank of its node; nothing is sent where one rank writes."""
    assert [Ranks(rank=2, world_size=4).writer_of(rank) for rank in range(4)] == [0, 0, 0, 0]
    nodes = Ranks(rank=2, world_size=5, writers=(0, 2))
    assert [nodes.writer_of(rank) for rank in range(5)] == [0, 0, 2, 2, 2]
    assert (nodes.writes_here, Ranks(rank=2, world_size=4).writes_here) == (True, False)
    assert Ranks().spread([], Path) == {}
    assert Ranks().with_node_writers().writers == (0,)
    assert Ranks().writers_first(None, 7) == 7


def test_a_long_work_of_rank_zero_keeps_the_others_inside_their_time_limit():
    """While it goes on a collective is made again and again; then come its value or its error."""
    told, pause = [], threading.Event()

    class Two(Ranks):
        def share(self, value, source=0):
            told.append(value)
            return value

    def work():
        while told.count(False) < 3:
            pause.wait(0.01)
        return 7

    def failing():
        raise ConfigError("a", expected="b", where="c", action="d")

    ranks = Two(0, 2, 0, 2)
    assert ranks.on_main(work, every=0.01) == 7
    assert told[:3] == [False] * 3 and told[-2:] == [True, (None, 7)]
    with pytest.raises(ConfigError, match="a"):
        ranks.on_main(failing, every=0.01)
    assert Ranks().on_main(lambda: 8) == 8


def test_main_first_raises_the_error_of_rank_zero():
    """An error of the main process reaches whoever waits for its value."""
    assert Ranks().main_first(None, 7) == 7
    with pytest.raises(ConfigError):
        Ranks().main_first(ConfigError("a", expected="b", where="c", action="d"))
