# SPDX-License-Identifier: Apache-2.0
"""The paper model is arithmetic: its figures are those a person works out by hand."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from mprecipes.checkpoint import replicas
from mprecipes.errors import ConfigError
from mprecipes.tools.cli import app
from mprecipes.tools.plan import GB, WINDOW_BYTES, Job, Rates, best_interval, plan

RATES = Rates(copy=20 * GB, disk=2 * GB, shared=200 * GB, read=4 * GB, hash=3.5 * GB, start=120.0)


def test_seven_billion_on_64_ranks():
    """84 GB of state; 1.3125 GB a rank; eight a node share 2 GB/s; a failure in 781 h."""
    found = plan(Job(7e9, 64), RATES)
    assert found.state == 84e9 and found.rank_bytes == 1.3125e9
    assert found.stall == pytest.approx(1.3125 / 20)
    assert found.write == pytest.approx(1.3125 / 20 + 0.064 + 1.3125 * 8 / 2)
    assert found.data_order == pytest.approx(1024 * 0.65e-6)
    assert found.restart == pytest.approx(120 + 0.064 + 1.3125 * 8 / 4 + 1024 * 0.65e-6)
    assert found.mean_time_between_failures == 50_000 * 3600 / 64
    assert found.interval == pytest.approx(607.6, abs=0.1) and found.interval_steps == 61
    assert found.disk == 84e9 * 5
    lost = 0.065625 / 607.6 + (607.6 / 2 + 5.38 + 122.69) / 2_812_500
    assert found.lost == pytest.approx(lost, rel=1e-3)


def test_replicated_state_is_written_in_shares_and_read_whole():
    """DDP on 16 ranks of 2 nodes: a rank writes 1/16, a node reads all 12 GB, the storage twice."""
    found = plan(Job(1e9, 16, sharded=False), RATES)
    assert found.rank_bytes == 12e9 / 16
    assert found.stall == pytest.approx((12e9 / 16 + 16 * 2**20) / 20e9)
    read = max(12 / 4, 12 / 3.5, 24 / 200)
    assert found.restart == pytest.approx(120 + 0.016 + read + 1024 * 0.65e-6)


def test_the_window_is_the_one_that_saves_copy():
    """Replicas are compared in the same 16 MiB that the model counts; one rank has no other."""
    assert WINDOW_BYTES == replicas.WINDOW_BYTES
    assert plan(Job(1e9, 1, sharded=False), RATES).stall == pytest.approx(12 / 20)


def test_a_tensor_is_never_cut_when_not_sharded():
    """With 4096 DDP ranks the largest tensor, of 0.5 GB in FP32, decides what one rank writes."""
    found = plan(Job(1e9, 4096, sharded=False, largest=125e6), RATES)
    assert found.rank_bytes == 0.5e9


@pytest.mark.parametrize("parameters", [1e9, 7e9, 70e9, 400e9])
def test_the_stall_falls_with_the_ranks(parameters):
    """From 8 to 4096 ranks each doubling halves stall and bytes of a rank; the state stays."""
    plans = [plan(Job(parameters, 2**power), RATES) for power in range(3, 13)]
    for one, next_ in itertools.pairwise(plans):
        assert next_.stall == pytest.approx(one.stall / 2)
        assert next_.rank_bytes * next_.ranks == pytest.approx(one.state)
        assert next_.interval <= one.interval


def test_shared_storage_is_the_limit_of_many_nodes():
    """512 nodes ask for 1 TB/s; the storage gives 200 GB/s, so 4.8 TB take 24 s."""
    found = plan(Job(400e9, 4096), RATES)
    assert found.write == pytest.approx(found.stall + 4.096 + 24)
    free = plan(Job(400e9, 4096), replace(RATES, shared=math.inf))
    assert free.write == pytest.approx(free.stall + 4.096 + 4800 / 4096 * 8 / 2)


@pytest.mark.parametrize("cost", [0.01, 1.0, 60.0, 600.0])
def test_the_interval_is_where_daly_s_model_is_least(cost):
    """Within 0.2 % of the minimum found by search, of mean times between 1 and 100 hours."""
    for mean_time in (3600.0, 36_000.0, 360_000.0):
        found = best_interval(cost, mean_time)

        def time_taken(interval, mean_time=mean_time):
            return mean_time * math.expm1((interval + cost) / mean_time) / interval

        candidates = [found * (0.5 + number / 2000) for number in range(2001)]
        assert time_taken(found) <= min(map(time_taken, candidates)) * (1 + 2e-5)
        assert found == pytest.approx(min(candidates, key=time_taken), rel=2e-2)


def test_a_save_dearer_than_the_time_between_failures():
    """The formula ends at twice the mean time: then one save per mean time."""
    assert best_interval(200.0, 100.0) == 100.0
    assert best_interval(50.0, 1e9) == pytest.approx(math.sqrt(2 * 50 * 1e9), rel=1e-3)


def test_a_save_never_begins_before_the_one_before_has_ended():
    """On a slow disk the interval is the time of writing, whatever the failures."""
    found = plan(Job(7e9, 8), replace(RATES, disk=0.01 * GB))
    assert found.interval == found.write > 8000


@pytest.mark.parametrize("name", ["parameters", "ranks", "kept", "step_seconds"])
def test_a_number_that_cannot_be_is_refused(name):
    """Zero of what must be there is named with its option."""
    with pytest.raises(ConfigError) as caught:
        plan(replace(Job(1e9, 8), **{name: 0}), RATES)
    error = caught.value
    assert (error.found, error.where) == (f"{name} 0", f"--{name}")
    assert error.expected == "a number above 0" and error.action.startswith(f"give --{name}")


@pytest.mark.parametrize("name", ["parameters", "step_seconds", "largest"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(name, value):
    """Of a job every number is finite."""
    with pytest.raises(ConfigError) as caught:
        plan(replace(Job(1e9, 8), **{name: value}), RATES)
    assert (caught.value.found, caught.value.where) == (f"{name} {value:g}", f"--{name}")
    assert caught.value.expected == "a finite number above 0"


def test_rates_are_finite_but_for_the_shared_storage():
    """Node-local disks have no storage in common to wait for; nothing else is infinitely fast."""
    assert plan(Job(7e9, 64), replace(RATES, shared=math.inf)).write < 6
    for name, value in (("shared", math.nan), ("disk", math.inf), ("copy", math.nan)):
        with pytest.raises(ConfigError, match=f"{name} {value:g}"):
            plan(Job(7e9, 64), replace(RATES, **{name: value}))
    with pytest.raises(ConfigError, match="a save of inf bytes"):
        plan(Job(1e308, 8), RATES)


def test_infinite_storage_is_strict_json():
    """The text "inf", which every reader of JSON takes; 1e400 is refused, not a traceback."""
    command = ["plan", "--parameters", "7e9", "--ranks", "64", "--shared", "inf", "--json"]
    facts = json.loads(CliRunner().invoke(app, command).stdout, parse_constant=pytest.fail)
    assert facts["rates"]["shared"] == "inf"
    for wrong in ("1e400", "nan"):
        error = CliRunner().invoke(app, ["plan", "--parameters", wrong, "--ranks", "8"]).exception
        assert isinstance(error, ConfigError)


def test_the_command_of_the_page():
    """A row for each size and number of ranks, in a table for pages; all values with --json."""
    command = ["plan", "--parameters", "7e9", "--parameters", "1e9", "--ranks", "8"]
    command += ["--ranks", "64", "--disk", "2", "--start", "120"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) == 6 and lines[0].startswith("| parameters | ranks | state |")
    assert lines[3].startswith("| 7 B | 64 | 84 GB | 1.31 GB | 65.6 ms | 5.38 s | 2.04 min |")
    facts = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert [row["ranks"] for row in facts["plans"]] == [8, 64, 8, 64]
    assert facts["rates"]["disk"] == 2e9 and facts["plans"][1]["rank_bytes"] == 1.3125e9
