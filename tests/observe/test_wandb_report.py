# SPDX-License-Identifier: Apache-2.0
"""A report saved by the real client, as the server on loopback received it."""

import importlib.util
import json

import pytest

from tests.launching import run_command
from tests.made_runs import make_arm
from tests.wandb_stub import ENTITY, WandbStub

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        importlib.util.find_spec("wandb_workspaces") is None,
        reason="the extra reports is not installed",
    ),
]
WATCH = {"report_to": ["wandb"], "project": "modes"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    home = tmp_path_factory.mktemp("runs")
    fast = {"tokens_per_second": 1500.0}
    return make_arm(home, "fp32", watch=WATCH) + make_arm(home, "bf16", watch=WATCH, **fast)


def report(stub, paths, home, way):
    command = ["mprecipes", "report", *paths, "--output_dir", home / "out", "--wandb_report", way]
    env = {**stub.env, "HOME": str(home), "WANDB_ENTITY": "", "WANDB_PROJECT": ""}
    return run_command(command, env=env, timeout=120)


def test_it_arrives_as_it_was_meant(paths, tmp_path):
    """In the project of the runs, which is made; the spec is that of `json`, ids aside."""
    with WandbStub() as stub:
        done = report(stub, paths, tmp_path, "publish")
        assert done.returncode == 0, done.output
        assert stub.unknown == []
        assert stub.projects == ["modes"]
        (saved,) = stub.reports
        written = report(stub, paths, tmp_path, "json")
        assert written.returncode == 0, written.output
        assert len(stub.reports) == 1
    assert f"{stub.url}/{ENTITY}/modes/reports/" in done.output
    assert (saved["type"], saved["projectName"], saved["entityName"]) == ("runs", "modes", ENTITY)
    assert saved["displayName"] == "Precision modes compared"
    expected = json.loads((tmp_path / "out" / "wandb_report.json").read_text())
    assert without_ids(saved["spec"]) == without_ids(expected["spec"])
    text = json.dumps(saved["spec"])
    assert "**bf16: equivalent**" in text
    assert '"value": ["bf1600123456", "bf1610123456", "bf1620123456"]' in text


def test_a_draft_is_one(paths, tmp_path):
    """Seen by its author alone."""
    with WandbStub() as stub:
        done = report(stub, paths[:1], tmp_path, "draft")
        assert done.returncode == 0, done.output
        assert [saved["type"] for saved in stub.reports] == ["runs/draft"]


def without_ids(value):
    """The spec without the identifiers that are drawn anew each time."""
    if isinstance(value, dict):
        drawn = ("id", "__id__", "ref")
        return {k: without_ids(v) for k, v in value.items() if k not in drawn}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def test_a_server_that_refuses_costs_only_the_report_there(paths, tmp_path):
    """Exit code 1 and the reason; page and numbers are on disk all the same."""
    with WandbStub() as stub:
        stub.mood = "refuse"
        done = report(stub, paths[:1], tmp_path, "publish")
    assert done.returncode == 1
    assert "--wandb_report publish" in done.output
    assert (tmp_path / "out" / "report.html").exists()
