# SPDX-License-Identifier: Apache-2.0
"""The record that FP8 runs look for is what the probe found, passed or not."""

import json
import math
from types import SimpleNamespace

import pytest

from mprecipes.compute.validation import require_validation, subject
from mprecipes.errors import ConfigError
from mprecipes.observe.tracking import Tracking
from mprecipes.tools.probe import ModeFindings
from mprecipes.tools.probe_report import keep_record, report_verdicts, track_probe, write_findings
from tests.toy_model import tiny_llama

RECIPE = SimpleNamespace(name="r", version="1.2.0")
CONFIG = tiny_llama().config.to_dict()
ABOUT = subject(CONFIG, recipe="r", version="1.2.0", fp8_recipe="rowwise")


def findings(passed):
    layers = {"a.weight": [0.1, 0.99], "b.weight": [0.2, 0.97]}
    return [
        ModeFindings("fp32", passed=True, losses=[2.0, 1.0]),
        ModeFindings("fp8", passed=passed, reason="why", losses=[2.0, 1.1], layers=layers),
    ]


def test_a_passing_record_lets_a_run_start(tmp_path):
    """Figures, limits and the worst parameter are in it; it stands beside the recipe."""
    path = keep_record(tmp_path / "r.py", RECIPE, CONFIG, "rowwise", findings(True), 24)
    assert path.parent == tmp_path / "validations"
    record = require_validation(tmp_path, ABOUT)
    assert record["worst_gradient"]["parameter"] == "b.weight" and record["steps"] == 24
    assert record["limits"]["cosine"] == 0.95 and record["hidden_size"] == 32


def test_a_failing_record_does_not(tmp_path):
    """The reason the probe gave is in the refusal."""
    keep_record(tmp_path / "r.py", RECIPE, CONFIG, "rowwise", findings(False), 24)
    with pytest.raises(ConfigError, match="FP8 did not pass: why"):
        require_validation(tmp_path, ABOUT)
    assert keep_record(tmp_path / "r.py", RECIPE, CONFIG, "rowwise", findings(True)[:1], 24) is None


def test_findings_are_kept_as_json_and_a_picture(tmp_path):
    """probe.json holds every figure; probe.png is a picture."""
    write_findings(tmp_path / "out", findings(True))
    found = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert found[1]["worst"] == ["b.weight", 0.2, 0.97]
    assert (tmp_path / "out" / "probe.png").read_bytes().startswith(b"\x89PNG")


def test_a_mode_that_diverged_is_strict_json(tmp_path):
    """A loss that is NaN is the text "nan" in probe.json and in the record."""
    found = findings(False)
    found[1].losses[1] = found[1].loss_gap = math.nan
    found[1].layers["b.weight"] = [math.inf, math.nan]
    write_findings(tmp_path / "out", found)
    kept = keep_record(tmp_path / "r.py", RECIPE, CONFIG, "rowwise", found, 24)
    read = [
        json.loads(path.read_text(), parse_constant=pytest.fail)
        for path in (tmp_path / "out" / "probe.json", kept)
    ]
    assert read[0][1]["losses"] == [2.0, "nan"]
    assert read[1]["loss_gap"] == "nan"


class Notes:
    """A tracker that writes down what it is told."""

    def __init__(self, told):
        self.told = told

    def row(self, step, values):
        self.told.append((step, values))

    def table(self, step, name, columns, rows):
        self.told.append((step, name, [dict(zip(columns, row, strict=True)) for row in rows]))

    def artifact(self, name, kind, files, copied):
        self.told.append((name, kind, list(files), copied))

    def close(self, outcome, exit_code):
        self.told.append((outcome, exit_code))


def test_verdicts_reach_a_tracker(tmp_path):
    """Losses by step, one row a mode with its verdict, probe.json as a report, and the end."""
    told = []
    run = SimpleNamespace(path=tmp_path, run_id="r", wandb_id="w", attempt=0, is_main=True)
    openers = {"wandb": lambda config, say: told.append(config) or Notes(told)}
    with Tracking(run, ["wandb"], openers=openers) as tracking:
        tracking.begin({"recipe": "r"})
        report_verdicts(tracking, findings(False), tmp_path)
    assert told[0] == {"recipe": "r"}
    assert told[1] == (1, {"precision/probe_loss/fp32": 2.0, "precision/probe_loss/fp8": 2.0})
    step, name, (_, fp8) = told[3]
    assert (step, name, fp8["passed"], fp8["reason"]) == (2, "precision/probe", False, "why")
    assert (fp8["worst_parameter"], fp8["cosine"]) == ("b.weight", 0.97)
    assert told[4:] == [("probe", "probe", ["probe.json"], True), ("finished", 0)]


def test_a_tracker_needs_a_folder(tmp_path):
    """W&B without --output_dir is refused; without a tracker none is asked for."""
    config = SimpleNamespace(watch={"report_to": ["wandb"]})
    with pytest.raises(ConfigError, match="--output_dir"):
        track_probe(None, config)
    track_probe(None, SimpleNamespace(watch=None)).close()
