# SPDX-License-Identifier: Apache-2.0
"""Processes, engine, scaler and settings are those asked for, or nothing runs."""

from types import SimpleNamespace

import pytest

from mprecipes.compute.agreement import check_alike, check_built, check_processes
from mprecipes.compute.engines import ENGINES
from mprecipes.compute.precision import MODES
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import ConfigError


def test_a_launcher_that_started_fewer_processes_is_refused():
    """`--cpu --num_processes 2` silently starts one process; asked 2, measured 1 is an error."""
    with pytest.raises(ConfigError) as caught:
        check_processes({"origin": "cpu.yaml", "num_processes": 2}, world_size=1)
    error = caught.value
    assert error.found == "1 process runs after asking for 2 (cpu.yaml)"
    assert error.expected == "WORLD_SIZE 2" and error.where == "accelerate launch"
    assert "accelerate_configs/cpu.yaml" in error.action


def test_a_rank_with_other_settings_is_refused():
    """One rank started with another config file: its number, its value and rank 0's are named."""
    topology = {"sharding": "ddp", "cpu_threads": 1}
    measured = {"topology": topology, "precision": {"mode": "bf16", "rungs": "none"}}

    class Two(Ranks):
        def gather(self, value):
            return [value, {**value, "sharding": "zero2"}]

    with pytest.raises(ConfigError) as caught:
        check_alike(Two(), ENGINES["ddp"], measured, 1.0, False)
    error = caught.value
    assert (error.found, error.expected) == ("sharding is zero2 on rank 1", "ddp, as on rank 0")
    assert error.where == "accelerate launch of rank 1" and "same config" in error.action
    check_alike(Ranks(), ENGINES["ddp"], measured, 1.0, False)


def built(**changes):
    kind = SimpleNamespace(value="MULTI_CPU")
    values = {"scaler": None, "distributed_type": kind, "gradient_accumulation_steps": 2}
    return SimpleNamespace(**values | changes)


def test_what_accelerate_built_is_what_was_asked():
    """DDP in BF16 over two micro-batches, built as that, is no error."""
    check_built(built(), ENGINES["ddp"], MODES["bf16"], 2)


@pytest.mark.parametrize(
    ("changes", "found", "expected"),
    [
        ({"scaler": "a scaler"}, "loss scaler 'a scaler' in mode bf16", "scaler: none"),
        (
            {"distributed_type": SimpleNamespace(value="DEEPSPEED")},
            "accelerate runs DEEPSPEED after asking for ddp",
            "MULTI_CPU",
        ),
        (
            {"gradient_accumulation_steps": 1},
            "accelerate accumulates over 1 forwards",
            "2, as the recipe says",
        ),
    ],
)
def test_what_accelerate_built_otherwise_is_refused(changes, found, expected):
    """Another scaler, engine or accumulation is named beside the one asked for."""
    with pytest.raises(ConfigError) as caught:
        check_built(built(**changes), ENGINES["ddp"], MODES["bf16"], 2)
    error = caught.value
    assert found in error.found and expected in error.expected
    assert (error.where and "report" in error.action) or "unchanged" in error.action
