# SPDX-License-Identifier: Apache-2.0
"""Sabotage at start: what was asked is what runs, or nothing runs and the fact is named."""

import json
import re

import pytest
import yaml

from tests.engines.machines import launch_machines
from tests.fix64 import RECIPE, ROOT, options
from tests.launching import run_command

pytestmark = pytest.mark.launch


def refused(run, command, env=None):
    """Runs a command line that must train nothing; gives its output with single spaces."""
    done = run_command(command, env=env)
    assert done.returncode != 0, done.output
    assert not (run / "journal").exists()
    return re.sub(r"\s+", " ", done.output)


def accelerate(*flags):
    return ["accelerate", "launch", "--main_process_port", "0", *flags, RECIPE]


def own_config(folder, **settings):
    """A copy of zero2 whose DeepSpeed file says more."""
    said = json.loads((ROOT / "ds_configs/zero2.json").read_text())
    (folder / "ds.json").write_text(json.dumps(said | settings))
    config = yaml.safe_load((ROOT / "accelerate_configs/zero2.yaml").read_text())
    config["deepspeed_config"]["deepspeed_config_file"] = str(folder / "ds.json")
    (folder / "zero2.yaml").write_text(yaml.safe_dump(config))
    return folder / "zero2.yaml"


@pytest.mark.parametrize(
    ("key", "value", "option"),
    [
        ("gradient_clipping", 0.5, "max_grad_norm 1.0"),
        ("gradient_accumulation_steps", 2, "gradient_accumulation_steps 4"),
    ],
)
def test_deepspeed_with_another_number_than_the_recipe(rows, tmp_path, key, value, option):
    """Cases H03 and H04: clipping or accumulation said twice is refused with both values."""
    config, run = own_config(tmp_path, **{key: value}), tmp_path / "run"
    words = options(rows, run, per_device_train_batch_size=1, global_batch_size=8)
    output = refused(run, [*accelerate("--config_file", config), *words])
    assert f"{key}: {key} {value} ({tmp_path / 'ds.json'})" in output
    assert f"expected: {option}, as the recipe says" in output


def test_zero3_asked_and_plain_data_parallel_would_run(rows, tmp_path):
    """What drops DeepSpeed in silence: its variable is gone, the file still asks for it."""
    run = tmp_path / "run"
    forget = tmp_path / "forget.py"
    forget.write_text(
        "import os, runpy, sys\n"
        "os.environ.pop('ACCELERATE_USE_DEEPSPEED', None)\n"
        f"sys.argv[0] = {str(RECIPE)!r}\n"
        f"runpy.run_path({str(RECIPE)!r}, run_name='__main__')\n"
    )
    config = ROOT / "accelerate_configs/zero3.yaml"
    command = [*accelerate("--config_file", config)[:-1], forget, *options(rows, run)]
    output = refused(run, command)
    assert "plain data parallel would run after asking for DEEPSPEED" in output
    assert "expected: ACCELERATE_USE_DEEPSPEED=true from the launcher" in output


def test_two_processes_asked_and_one_runs(rows, tmp_path):
    """`--cpu` beside a ZeRO config drops engine and processes; refused by name."""
    run = tmp_path / "run"
    config = tmp_path / "cpu_zero.yaml"
    said = yaml.safe_load((ROOT / "accelerate_configs/zero2.yaml").read_text())
    config.write_text(yaml.safe_dump({**said, "distributed_type": "MULTI_CPU", "use_cpu": True}))
    output = refused(run, [*accelerate("--config_file", config), *options(rows, run)])
    assert f"1 process runs after asking for 2 ({config})" in output


def test_one_machine_with_another_config_file(rows, tmp_path):
    """Two launchers as two machines, one with ZeRO-2 and one with ZeRO-1: refused on both."""
    run = tmp_path / "run"
    words = options(rows, run, per_device_train_batch_size=2, global_batch_size=8)
    for done in launch_machines(["zero2", "zero1"], [words, words]):
        output = re.sub(r"\s+", " ", done.output)
        assert "sharding is zero1 on rank 1" in output, done.output
        assert "expected: zero2, as on rank 0" in output
    assert not (run / "journal").exists()
