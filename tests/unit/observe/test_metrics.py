# SPDX-License-Identifier: Apache-2.0
"""The metrics table, the file that never stops a training, and the rates of one process."""

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mprecipes.errors import ConfigError
from mprecipes.observe.metrics import GROUPS, METRICS, MetricsLog, ThroughputMeter, read_metrics


def test_every_metric_of_the_table_has_a_group_and_a_meaning():
    """Each name is group/name with a known group, and says what it means."""
    assert METRICS["train/loss"].unit == "nats per token"
    for name, metric in METRICS.items():
        group, _, rest = name.partition("/")
        assert group in GROUPS
        assert rest
        assert metric.meaning


def test_a_line_holds_attempt_step_and_values(tmp_path):
    """What is logged is on disk, as one JSON object, before close."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, attempt=3)
    log.log(7, {"train/loss": 2.5, "eval/tokens": 640})
    assert path.read_text() == '{"attempt": 3, "step": 7, "train/loss": 2.5, "eval/tokens": 640}\n'
    log.close()


def test_values_that_are_not_finite_stay_visible(tmp_path):
    """NaN and infinity are written as valid JSON and come back as floats."""
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.log(1, {"train/loss": math.nan, "train/grad_norm": -math.inf})
    assert '"train/loss": "nan", "train/grad_norm": "-inf"' in path.read_text()
    (line,), torn = read_metrics(path)
    assert math.isnan(line["train/loss"])
    assert line["train/grad_norm"] == -math.inf
    assert torn == 0


def test_lines_that_are_none_are_counted(tmp_path):
    """Cut off, no object, and a value that is no number: left out, the others are there."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1}\n{"step": 2, "tr\n20\n{"step": 3, "train/loss": "much"}\n{"step": 4}'
    )
    assert read_metrics(path) == ([{"step": 1}, {"step": 4}], 3)


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path):
    """A typing error in a metric name is an error on every rank, not a second curve."""
    for enabled in (True, False):
        with pytest.raises(ConfigError) as caught:
            MetricsLog(tmp_path / "metrics.jsonl", enabled=enabled).log(1, {"train/los": 1.0})
        error = caught.value
        assert error.found == "unknown metric 'train/los'"
        assert error.expected == "a name of the table; the nearest is 'train/loss'"
        assert error.where == "MetricsLog.log"
        assert "declare(name, unit, meaning)" in error.action


@pytest.mark.parametrize(
    ("value", "kind"), [(True, "bool"), ("1.0", "str"), (torch.tensor(1.0), "Tensor")]
)
def test_only_plain_numbers_are_logged(tmp_path, value, kind):
    """A tensor would be a hidden wait for the device, a bool or text a mistake."""
    with pytest.raises(ConfigError) as caught:
        MetricsLog(tmp_path / "metrics.jsonl").log(1, {"train/loss": value})
    error = caught.value
    assert error.found == f"train/loss = {value!r} ({kind})"
    assert error.expected == "a plain int or float"
    assert error.where == "MetricsLog.log"
    assert ".item()" in error.action
    assert not (tmp_path / "metrics.jsonl").exists()


def test_numpy_scalars_are_plain_numbers(tmp_path):
    """NumPy's floats and integers are written as numbers."""
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.log(1, {"train/loss": np.float32(0.5), "train/updates": np.int64(4)})
    assert read_metrics(path) == (
        [{"attempt": 0, "step": 1, "train/loss": 0.5, "train/updates": 4}],
        0,
    )


def test_a_recipe_may_declare_its_own_metric(tmp_path):
    """A declared name is accepted, and the same declaration again changes nothing."""
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.declare("train/z_loss", "nats", "auxiliary loss")
        log.declare("train/z_loss", "nats", "auxiliary loss")
        log.log(1, {"train/z_loss": 0.25})
    assert read_metrics(path)[0][0]["train/z_loss"] == 0.25
    assert "train/z_loss" not in METRICS


@pytest.mark.parametrize("name", ["z_loss", "train/", "mine/z_loss"])
def test_a_declared_name_needs_a_known_group(tmp_path, name):
    """Names outside group/name are refused, so that W&B groups stay what they are."""
    with pytest.raises(ConfigError) as caught:
        MetricsLog(tmp_path / "metrics.jsonl").declare(name, "", "something")
    error = caught.value
    assert error.found == f"metric name {name!r}"
    assert error.expected.startswith("group/name with a group of train, eval, precision, perf")
    assert error.where == "MetricsLog.declare"
    assert error.action.startswith("rename it")


def test_a_metric_may_not_change_its_meaning(tmp_path):
    """Declaring a known name with another unit or meaning is refused."""
    with pytest.raises(ConfigError) as caught:
        MetricsLog(tmp_path / "metrics.jsonl").declare("train/loss", "bits", "per byte")
    error = caught.value
    assert error.found == "metric 'train/loss' as 'per byte' in 'bits'"
    assert "in 'nats per token'" in error.expected
    assert error.where == "MetricsLog.declare"
    assert error.action.startswith("choose another name")


def test_a_disabled_log_writes_nothing(tmp_path):
    """Ranks other than the main one leave no file."""
    with MetricsLog(tmp_path / "metrics.jsonl", enabled=False) as log:
        log.log(1, {"train/loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_attempt_appends_after_a_torn_line(tmp_path):
    """A line cut off by a kill is counted, and the next attempt's line does not continue it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"attempt": 0, "step": 1, "train/loss": 3.0}\n{"attempt": 0, "ste')
    with MetricsLog(path, attempt=1) as log:
        log.log(2, {"train/loss": 2.0})
    lines, torn = read_metrics(path)
    assert [(line["attempt"], line["step"], line["train/loss"]) for line in lines] == [
        (0, 1, 3.0),
        (1, 2, 2.0),
    ]
    assert torn == 1


@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_a_failing_disk_is_counted_and_warned_about_once(tmp_path, monkeypatch, caplog, fault):
    """A full or broken disk loses its lines and nothing else."""
    monkeypatch.setenv(
        "MPRECIPES_FAULT", f"{fault}@metrics.before_write:2,{fault}@metrics.before_write:3"
    )
    path = tmp_path / "metrics.jsonl"
    with caplog.at_level(logging.WARNING), MetricsLog(path) as log:
        for step in (1, 2, 3, 4):
            log.log(step, {"train/loss": float(step)})
        assert log.lost == 2
        assert len(caplog.records) == 1
    assert [line["step"] for line in read_metrics(path)[0]] == [1, 4]
    first, last = (record.getMessage() for record in caplog.records)
    assert "metrics are being lost" in first
    assert "Free space or check the file system" in first
    assert last.endswith("2 lines were lost in all")


def test_a_really_full_device_never_stops_the_training(caplog):
    """Writing to the kernel's always-full device loses every line without an exception."""
    log = MetricsLog(Path("/dev/full"))
    log.log(1, {"train/loss": 1.0})
    log.log(2, {"train/loss": 1.0})
    log.close()
    assert log.lost == 2


def test_a_missing_folder_is_counted_not_raised(tmp_path):
    """A run folder that vanished does not end the training through its metrics."""
    log = MetricsLog(tmp_path / "gone" / "metrics.jsonl")
    log.log(1, {"train/loss": 1.0})
    (tmp_path / "gone").mkdir()
    log.log(2, {"train/loss": 1.0})
    log.close()
    assert log.lost == 1
    assert [line["step"] for line in read_metrics(log.path)[0]] == [2]


def test_reading_a_file_that_is_absent_gives_no_lines(tmp_path):
    """A run that logged nothing yet reads as empty."""
    assert read_metrics(tmp_path / "metrics.jsonl") == ([], 0)


def test_the_first_step_counts_for_no_rate():
    """A first step of 60 s leaves 100 tokens a second as they are."""
    meter = ThroughputMeter()
    meter.update(tokens=50, seconds=60.0)
    assert meter.tokens_per_second is None
    assert meter.step_seconds is None
    for _ in range(3):
        meter.update(tokens=50, seconds=0.5)
    assert meter.tokens_per_second == pytest.approx(100.0)
    assert meter.step_seconds == pytest.approx(0.5)


def test_only_the_window_counts():
    """With a window of two steps, a slow step leaves the rate once two newer ones ended."""
    meter = ThroughputMeter(window=2)
    for seconds, tokens in ((1.0, 7), (10.0, 1000), (1.0, 30), (1.0, 50)):
        meter.update(tokens, seconds)
    assert meter.tokens_per_second == pytest.approx(40.0)
    assert meter.step_seconds == pytest.approx(1.0)
