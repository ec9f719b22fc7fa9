# SPDX-License-Identifier: Apache-2.0
"""What the launcher asked for is what runs, or nothing runs."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from mprecipes.compute import launch
from mprecipes.errors import ConfigError
from mprecipes.identity.config import Origins


@dataclass
class Options:
    """The options that `start` reads."""

    output_dir: str
    precision: str = "auto"
    per_device_train_batch_size: int = 2
    gradient_accumulation_steps: int | None = None
    global_batch_size: int | None = None
    numerics: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"global_batch_size": 7}, "global_batch_size 7 is not"),
        ({"numerics": {"loss_scale": 0}}, "loss_scale is 0"),
        ({"precision": "bf15"}, "precision 'bf15'"),
    ],
)
def test_a_dry_run_refuses_what_can_be_refused_without_a_start(tmp_path, capsys, changed, found):
    """It then prints the config and exits 0; no Accelerator is built, no folder is made."""
    run = tmp_path / "run"
    origins = Origins(dict.fromkeys(vars(Options("")), "default"))
    origins.dry_run = True
    with pytest.raises(ConfigError) as caught:
        launch.start(Options(str(run), **changed), origins)
    assert found in caught.value.found and capsys.readouterr().out == ""
    with pytest.raises(SystemExit) as ended:
        launch.start(Options(str(run)), origins)
    assert ended.value.code == 0 and "per_device_train_batch_size: 2" in capsys.readouterr().out
    assert not run.exists() and not AcceleratorState._shared_state


def test_masters_that_are_not_fp32_are_refused():
    """Case F01: one BF16 weight among FP32 ones is named before the optimizer can round it away."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    started = launch.Launch(None, None, None, torch.device("cpu"), None, {})
    with pytest.raises(ConfigError) as caught:
        started.check_masters(model)
    error = caught.value
    assert error.found.startswith("2 trainable parameters are not FP32: 1.weight is bfloat16")
    assert error.where == "build_model" and "model.float()" in error.action
    started.check_masters(model.float())
