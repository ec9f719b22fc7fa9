# SPDX-License-Identifier: Apache-2.0
"""A plain copy of the recipe and its YAML, in an empty folder outside the repository."""

import hashlib
import json
import shutil

import pytest

from tests.fix64 import RECIPE, ROOT
from tests.launching import run_command
from tests.reading import checkpoint, outcomes, run_json

pytestmark = pytest.mark.launch

YAML = ROOT / "recipes" / "configs" / "pretrain_causal_lm" / "tiny-cpu.yaml"
ACCELERATE = ROOT / "accelerate_configs" / "cpu.yaml"


def test_a_copy_launches_drills_and_is_reported_as_one(tmp_path):
    """Launched and drilled from its own folder, it says whose copy it is wherever a run says so."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    shutil.copy(RECIPE, folder)
    shutil.copy(YAML, folder)
    given = [RECIPE.name, "--config", YAML.name]

    small = ["--max_steps", 4, "--save_steps", 2, "--eval_steps", "none"]
    launch = ["accelerate", "launch", "--config_file", ACCELERATE]
    done = run_command([*launch, *given, *small, "--output_dir", "run"], cwd=folder)
    assert done.returncode == 0, done.output
    drill = ["mprecipes", "drill", *given, *small, "--kill_at_step", 3, "--output_dir", "drill"]
    done = run_command([*drill, "--accelerate_config", ACCELERATE, "--json"], cwd=folder)
    assert done.returncode == 0, done.output
    found = json.loads((folder / "drill" / "drill.json").read_text())
    assert found["equal"] is True
    assert (found["recipe"], found["status"]) == ("pretrain_causal_lm@1.0.0", "copy")
    assert outcomes(folder / "drill" / "interrupted") == ["killed", "finished"]

    sha256 = hashlib.sha256(RECIPE.read_bytes()).hexdigest()
    copied = {
        "name": "pretrain_causal_lm",
        "version": "1.0.0",
        "based_on": f"pretrain_causal_lm@1.0.0#{sha256[:8]}",
        "sha256": sha256,
        "status": "copy",
        "parent": f"pretrain_causal_lm@1.0.0#{sha256[:8]}",
    }
    run = folder / "run"
    assert run_json(run)["recipe"] == copied
    assert (run / "recipe.py").read_bytes() == RECIPE.read_bytes()
    inspected = run_command(["mprecipes", "inspect", checkpoint(run, 4), "--json"])
    assert json.loads(inspected.output)["recipe"] == copied
    status = run_command(["mprecipes", "status", run, "--json"])
    facts = json.loads(status.output)
    assert (status.returncode, facts["recipe"]) == (0, "pretrain_causal_lm@1.0.0")
    assert facts["recipe_status"] == "copy"
