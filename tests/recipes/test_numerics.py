# SPDX-License-Identifier: Apache-2.0
"""What a run tells of its numbers, trained in this process."""

import json

import pytest
import torch

from mprecipes import read_metrics
from mprecipes.errors import ConfigError
from tests.fix64 import options, write_rows
from tests.inprocess import train
from tests.reading import journal


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


def run_with(rows, run, precision, numerics=None, change=None, **options_):
    words = options(rows, run, **{"precision": precision, "max_steps": 4, "logging_steps": 1,
                    "numerics": json.dumps(numerics or {}), **options_})  # fmt: skip
    return train([*words, "--allow_unvalidated_fp8"], change)


def precision_metrics(run):
    lines, _ = read_metrics(run / "metrics.jsonl")
    found = {}
    for line in lines:
        part = {name: v for name, v in line.items() if name.startswith("precision/")}
        found.setdefault(line["step"], {}).update(part)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_each_mode_is_measured_when_it_is_due(rows, tmp_path, precision):
    """Every second step: gradient norms by layer, shares, activations; amax of FP8 modules."""
    assert run_with(rows, tmp_path / "run", precision, {"numerics_steps": 2}).error is None
    found = precision_metrics(tmp_path / "run")
    due = [step for step, values in found.items() if "precision/nonfinite_gradients" in values]
    assert due == [2, 4]
    values = found[4]
    norms = [v for name, v in values.items() if name.startswith("precision/layer_grad_norm/")]
    assert len(norms) == 4  # two layers, final norm, tied embedding
    whole = sum(norm**2 for norm in norms) ** 0.5
    assert whole == pytest.approx(journal(tmp_path / "run")[4]["grad_norm"], rel=1e-5)
    assert values["precision/vanishing_updates_masters"] < 0.01
    assert values["precision/vanishing_updates_bf16"] > values["precision/vanishing_updates_fp16"]
    assert len([n for n in values if "/fp8_amax/" in n]) == (14 if precision == "fp8" else 0)
    assert "precision/subnormal_activations/model.layers.1" in values


def test_measuring_does_not_change_the_training(rows, tmp_path):
    """Bit-equal losses with and without, dropout on."""
    losses = []
    for every in (1, None):
        run = tmp_path / str(every)
        assert run_with(rows, run, "bf16", {"numerics_steps": every}).error is None
        losses.append([line["loss"].hex() for line in journal(run).values()])
    assert losses[0] == losses[1]


def test_a_small_static_scale_loses_more_gradients(rows, tmp_path):
    """FP16 at static scale 1 against 65536: the share that underflows is reported and larger."""
    shares = []
    for scale in (1, 65536):
        run = tmp_path / str(scale)
        numerics = {"loss_scale": scale, "numerics_steps": 1}
        assert run_with(rows, run, "fp16", numerics).error is None
        shares.append(precision_metrics(run)[3]["precision/gradient_underflow_fp16"])
        assert {line["loss_scale"] for line in journal(run).values()} == {float(scale)}
    assert shares[0] > 2 * shares[1]


def test_clipping_acts_on_unscaled_gradients(rows, tmp_path):
    """The gradient norm of the first step is equal for scales 2^8 and 2^16, and so is clipping."""
    norms = []
    for scale in (2**8, 2**16):
        run = tmp_path / str(scale)
        assert run_with(rows, run, "fp16", {"loss_scale": scale}, max_grad_norm=0.1).error is None
        norms.append([line["grad_norm"] for line in journal(run).values()])
    assert norms[0] == pytest.approx(norms[1], rel=2e-3)
    assert norms[0][0] > 0.1  # and it was clipped


@pytest.mark.parametrize(
    ("precision", "place", "named"),
    [
        ("fp16", "model.layers.0.mlp.down_proj", "overflow in model.layers.0.mlp.down_proj)"),
        ("fp16", "model.layers.1.mlp.up_proj", "overflow in model.layers.1.mlp.up_proj)"),
        # FP8 replaces each Linear and its hooks: planted in what the last of a block gives
        ("fp8", "model.layers.0.mlp", "first in model.layers.0.mlp.down_proj)"),
        ("fp8", "model.layers.1.mlp", "first in model.layers.1.mlp.down_proj)"),
    ],
)
def test_a_planted_overflow_is_named_by_its_layer(rows, tmp_path, precision, place, named, capsys):
    """Infinity in the gradient of one module's output at step 3: its layer is in the line."""
    calls = []

    def plant(recipe):
        build_model = recipe.build_model

        def build(config):
            model = build_model(config)

            def hook(module, inputs, output):
                calls.append(1)
                if len(calls) == 3:
                    output.register_hook(lambda gradient: gradient * float("inf"))

            model.get_submodule(place).register_forward_hook(hook)
            return model

        recipe.build_model = build

    policy = {"on_numeric_failure": "skip"}
    assert run_with(rows, tmp_path / "run", precision, policy, plant).error is None
    lines = [line for line in capsys.readouterr().out.splitlines() if "step 3 skipped" in line]
    assert len(lines) == 1 and named in lines[0]
    if precision == "fp16":
        assert lines[0].startswith("loss scale 65536 -> 32768, step 3 skipped")
        assert lines[0].endswith("skipping step, reducing scale")


def test_modules_are_kept_in_fp32_in_a_run(rows, tmp_path):
    """The manifest names them; the run is another one than without."""
    losses = []
    for patterns in ([], ["*.mlp"]):
        run = tmp_path / str(len(patterns))
        done = run_with(rows, run, "bf16", {"keep_in_fp32": patterns})
        assert done.error is None
        losses.append([line["loss"] for line in journal(run).values()])
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_a_kept_module_that_is_never_called_stops_the_run(rows, tmp_path):
    """Sabotage: the pattern names a module the forward passes by; exit 2 before the update."""

    def plant(recipe):
        build_model = recipe.build_model

        def build(config):
            model = build_model(config)
            model.spare = torch.nn.Linear(2, 2)
            model.spare.requires_grad_(False)
            return model

        recipe.build_model = build

    done = run_with(rows, tmp_path / "run", "bf16", {"keep_in_fp32": ["spare"]}, plant)
    assert isinstance(done.error, ConfigError)
    assert "spare gave nothing: never called" in done.error.found
