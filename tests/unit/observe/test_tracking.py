# SPDX-License-Identifier: Apache-2.0
"""Rows, reports and alerts reach every sink of the main process; no sink reaches the training."""

import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from mprecipes import ConfigError, Preempted, Tracking, track
from mprecipes.errors import ResumeHalted, RunFinished
from tests.launching import environment

REST = {"expected": "b", "where": "c", "action": "d"}


class Notes:
    """A sink that writes down what it is told."""

    def __init__(self, config, say):
        self.told = [("config", config)]
        self.say = say

    def row(self, step, values):
        self.told.append(("row", step, values))

    def table(self, step, name, columns, rows):
        self.told.append(("table", step, name, columns, rows))

    def artifact(self, name, kind, files, copied):
        self.told.append(("artifact", name, kind, files, copied))

    def alert(self, title, text, level):
        self.told.append(("alert", title, text, level))

    def close(self, outcome, exit_code):
        self.told.append(("close", outcome, exit_code))


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "a-run"
    return SimpleNamespace(path=path, run_id="r", wandb_id="w", attempt=2, is_main=True)


@pytest.fixture
def has_tensorboard(tmp_path, monkeypatch):
    """Something by that name is installed."""
    (tmp_path / "tensorboardX.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


def tracking_of(run, sink_type=Notes, names=("wandb",), **arguments):
    """Gives a tracking, and the dict that gets its sinks by name once they are opened."""
    sinks = {}

    def opener(name):
        return lambda config, say: sinks.setdefault(name, sink_type(config, say))

    openers = {name: opener(name) for name in names}
    return Tracking(run, names, openers=openers, **arguments), sinks


def test_everything_reaches_the_sink_in_order(run, tmp_path):
    """A flat config, rows as they were at the call, a table, artifacts by their path, the end."""
    tracking, sinks = tracking_of(run)
    values = {"train/loss": 1.5}
    with tracking:
        tracking.begin({"precision": "bf16", "a": {"b": 1}})
        tracking.log(3, values)
        values["train/loss"] = 9.0
        tracking.table(3, "resume/checks", ("check", "ok"), [("weights", True)])
        tracking.reference("m", "checkpoint", {"manifest.json": tmp_path / "manifest.json"})
        tracking.report("r", "resume", tmp_path / "attempt-0001.json")
    assert sinks["wandb"].told == [
        ("config", {"precision": "bf16", "a.b": 1}),
        ("row", 3, {"train/loss": 1.5}),
        ("table", 3, "resume/checks", ["check", "ok"], [["weights", True]]),
        ("artifact", "m", "checkpoint", {"manifest.json": tmp_path / "manifest.json"}, False),
        ("artifact", "r", "resume", {"attempt-0001.json": tmp_path / "attempt-0001.json"}, True),
        ("close", "finished", 0),
    ]
    assert tracking.lost == 0


def test_other_ranks_open_nothing(run):
    """Rank 1 of a launch has no sink, and its calls do nothing."""
    run.is_main = False
    tracking, sinks = tracking_of(run)
    with tracking:
        tracking.begin({})
        tracking.log(1, {"train/loss": 1.0})
        tracking.alert("a", "b")
    assert sinks == {}
    assert tracking.lost == 0


def test_a_run_that_is_refused_before_it_began_opens_nothing(run):
    """An error before `begin` passes through without a run in W&B."""
    tracking, sinks = tracking_of(run)
    with pytest.raises(ConfigError), tracking:
        raise ConfigError("a", **REST)
    assert sinks == {}


@pytest.mark.parametrize(
    ("error", "end", "level"),
    [
        (ResumeHalted("a", **REST), ("close", "halted", 4), "ERROR"),
        (Preempted("a", **REST), ("close", "preempted", 75), "WARN"),
        (ZeroDivisionError(), ("close", "crashed", 1), None),
        (KeyboardInterrupt(), ("close", "crashed", 1), None),
        (RunFinished("a", **REST), ("close", "finished", 0), None),
    ],
)
def test_how_it_ended_is_told(run, error, end, level):
    """A halt and a preemption send an alert with the whole message; the error passes through."""
    tracking, sinks = tracking_of(run)
    with pytest.raises(type(error)), tracking:
        tracking.begin({})
        raise error
    alerts = [told for told in sinks["wandb"].told if told[0] == "alert"]
    assert sinks["wandb"].told[-1] == end
    assert alerts == ([("alert", f"{end[1]}: a-run", str(error), level)] if level else [])


def test_a_sink_that_stands_still_slows_nobody(run):
    """A hundred rows are left while the first stands still: 3 wait, 96 are lost, counted, shown."""
    entered, free = threading.Event(), threading.Event()

    class Still(Notes):
        def row(self, step, values):
            entered.set()
            free.wait()
            super().row(step, values)

    tracking, sinks = tracking_of(run, Still, capacity=3)
    tracking.begin({})
    tracking.log(1, {"train/loss": 1.0})
    assert entered.wait(60)
    for step in range(2, 101):
        tracking.log(step, {"train/loss": 1.0})
    assert tracking.lost == 96
    assert tracking.news() == ["tracking: 96 rows lost; metrics.jsonl has them"]
    tracking.log(101, {"train/loss": 1.0})
    assert tracking.news() == []  # told again when it doubled
    free.set()
    tracking.close()
    assert [told[1] for told in sinks["wandb"].told if told[0] == "row"] == [1, 2, 3, 4]


def test_a_sink_that_hangs_at_the_end_is_left_behind(run, has_tensorboard, capsys):
    """With no seconds to wait, the end says what is lost and returns."""
    free = threading.Event()

    class Hanging(Notes):
        def row(self, step, values):
            free.wait()

    tracking, _ = tracking_of(run, Hanging, ["tensorboard"], close_seconds=0.0, grace_seconds=0.0)
    tracking.begin({})
    tracking.log(1, {"train/loss": 1.0})
    tracking.close()
    assert capsys.readouterr().out.splitlines() == [
        "tracking: tensorboard did not end within 0 s",
        "tracking: 1 rows lost; metrics.jsonl has them",
    ]
    free.set()


def test_one_sink_that_refuses_takes_nothing_from_the_other(run, has_tensorboard, capsys):
    """W&B raises at every row: one line says so, two rows are counted; TensorBoard has both."""
    told = []

    class Refusing(Notes):
        def row(self, step, values):
            raise ConnectionError("HTTP 500\n  from the server")

    class Good(Notes):
        def row(self, step, values):
            told.append(step)

    openers = {"wandb": Refusing, "tensorboard": Good}
    tracking = Tracking(run, ["wandb", "tensorboard"], openers=openers)
    with tracking:
        tracking.begin({})
        tracking.log(1, {"train/loss": 1.0})
        tracking.log(2, {"train/loss": 1.0})
    assert told == [1, 2]
    assert capsys.readouterr().out.splitlines() == [
        "tracking: wandb: ConnectionError: HTTP 500 from the server; the training goes on",
        "tracking: 2 rows lost; metrics.jsonl has them",
    ]


def test_what_a_sink_says_is_news(run):
    """A line from the courier's thread waits for whoever owns the console."""

    class Saying(Notes):
        def row(self, step, values):
            self.say("W&B: offline")

    tracking, _ = tracking_of(run, Saying)
    tracking.begin({})
    tracking.log(1, {"train/loss": 1.0})
    tracking._couriers["wandb"].close(lambda sink: None, 60)
    assert tracking.news() == ["W&B: offline"]
    assert tracking.news() == []


def test_the_option_is_checked_on_every_rank(run):
    """Rank 1 refuses what rank 0 refuses; by default nothing is opened."""
    run.is_main = False
    with pytest.raises(ConfigError, match="wandbb"):
        track(run, SimpleNamespace(watch={"report_to": ["wandbb"]}))
    run.is_main = True
    with track(run, SimpleNamespace(watch=None)) as tracking:
        tracking.begin({})
        assert tracking._couriers == {}


WRITER = """
import json, os
class SummaryWriter:
    def __init__(self, folder): self.folder = folder; self.told = []
    def add_hparams(self, values, metric_dict): self.told.append(["config", values])
    def add_scalar(self, name, value, global_step): self.told.append([name, value, global_step])
    def flush(self): pass
    def close(self):
        with open(os.path.join(self.folder, "told.json"), "w") as file: json.dump(self.told, file)
"""
TENSORBOARD = """
import sys
from pathlib import Path
from types import SimpleNamespace
from accelerate import PartialState
from mprecipes import Tracking
PartialState()
run = SimpleNamespace(path=Path(sys.argv[1]), run_id="r", wandb_id="w", attempt=2, is_main=True)
with Tracking(run, ["tensorboard"]) as tracking:
    tracking.begin({"a": {"b": 1}, "none": None})
    tracking.log(5, {"train/loss": 2.5, "eval/tokens": 7})
    tracking.alert("no place", "for it")
"""


@pytest.mark.launch
def test_tensorboard_gets_flat_values_by_step_in_a_folder_of_the_attempt(tmp_path):
    """Through accelerate's tracker and a stand-in for the writer, in a process of its own."""
    (tmp_path / "tensorboardX.py").write_text(WRITER)
    env = environment({"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"})
    command = [sys.executable, "-c", TENSORBOARD, str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, env=env)
    told = json.loads((tmp_path / "tensorboard" / "attempt-0002" / "told.json").read_text())
    assert told == [
        ["config", {"a.b": 1, "none": "none"}],
        ["train/loss", 2.5, 5],
        ["eval/tokens", 7, 5],
    ]
