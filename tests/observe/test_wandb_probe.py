# SPDX-License-Identifier: Apache-2.0
"""`mprecipes probe` with the real W&B client: offline, and against a loopback server."""

import json
import shutil

import pytest

from tests.fix64 import RECIPE, options, write_rows
from tests.launching import run_command
from tests.wandb_reading import config, history, records, segments
from tests.wandb_stub import WandbStub

pytestmark = pytest.mark.launch


def probe(folder, **env):
    """Probes bf16 for four steps; gives the folder of the findings."""
    copy = shutil.copy(RECIPE, folder / "recipe.py")
    words = options(write_rows(folder / "rows.jsonl"), folder / "out",
                    watch=json.dumps({"report_to": ["wandb"]}))  # fmt: skip
    command = ["mprecipes", "probe", copy, *words, "--modes", "bf16", "--steps", "4"]
    done = run_command(command, env={"WANDB_ERROR_REPORTING": "false", **env})
    assert done.returncode == 0, done.output
    return folder / "out"


def test_offline_a_probe_is_a_run_of_its_own(tmp_path):
    """Four rows of losses equal to probe.json, the verdicts' table, the config and the report."""
    out = probe(tmp_path)
    (segment,) = segments(out)
    rows = [row for row in history(segment) if "precision/probe_loss/bf16" in row]
    assert [row["train/step"] for row in rows] == [1, 2, 3, 4]
    found = json.loads((out / "probe.json").read_text())
    assert [row["precision/probe_loss/bf16"] for row in rows] == found[1]["losses"]
    (table,) = [row for row in history(segment) if "precision/probe.path" in row]
    assert table["precision/probe.nrows"] == 2
    assert config(segment)["recipe"] == "pretrain_causal_lm"
    assert "probe" in {artifact["type"] for artifact in records(segment, "artifact")}


def test_a_server_is_told_the_verdicts(tmp_path):
    """The loopback server has the losses, and probe.json as an artifact."""
    with WandbStub() as stub:
        out = probe(tmp_path, **stub.env, WANDB_FINISH_TIMEOUT="60")
    ((run, facts),) = stub.runs.items()
    assert facts["project"] == "mprecipes" and stub.config(run)["steps"] == 4
    losses = [row["precision/probe_loss/fp32"] for row in stub.history(run)
              if "precision/probe_loss/fp32" in row]  # fmt: skip
    assert losses == json.loads((out / "probe.json").read_text())[0]["losses"]
    assert "probe" in {artifact["type"] for artifact in stub.artifacts.values()}
    assert stub.unknown == []
