# SPDX-License-Identifier: Apache-2.0
"""FP16 and FP8 on the engines that shard: killed, launched again, bit-equal; asked is measured.

Two forked ranks per launch (tests/recipe_server.py), with the variables that accelerate's launcher
exports for each config; 16 steps, a checkpoint every 4, killed at 10. FP16 begins at a scale that
overflows and grows every three steps, so that the kill falls where scale, growth counter and
skipped updates all matter. Real launches of each config are in tests/recipes.
"""

import json

import pytest

from mprecipes import read_metrics
from tests.engine_env import engine_env
from tests.fix64 import options, write_rows
from tests.reading import (
    assert_released,
    assert_same_run,
    journal,
    manifest,
    outcomes,
    resume_report,
)
from tests.recipe_server import run_recipe

NUMERICS = {"initial_loss_scale": 2**22, "loss_scale_growth_interval": 3, "numerics_steps": 4}
PAIRS = {  # engine and precision -> the config that says the engine
    ("fsdp2", "fp8"): "fsdp2_fp8",
    ("zero2", "fp16"): "zero2_fp16",
    ("fsdp2", "fp16"): "fsdp2_fp16",
    ("zero1", "fp16"): "zero1_fp16",
    ("zero3", "fp16"): "zero3_fp16",
    ("zero3_offload", "fp16"): "zero3_offload_fp16",
    ("zero1", "fp8"): "zero1",  # DeepSpeed's files cannot name FP8
    ("zero2", "fp8"): "zero2",
}
COVERING = [("fsdp2", "fp8"), ("zero2", "fp16")]
REST = [pair for pair in PAIRS if pair not in COVERING]
COMPUTE = {"fp16": "float16", "fp8": "bfloat16"}


def check(folder, engine, precision):
    data, config = write_rows(folder / "rows.jsonl"), PAIRS[engine, precision]
    is_named = config.endswith(precision)

    def train(run, **env):
        words = options(
            data, run, precision="auto" if is_named else precision, max_steps=16, save_steps=4,
            per_device_train_batch_size=2, global_batch_size=8, numerics=json.dumps(NUMERICS),
        )  # fmt: skip
        words += ["--allow_unvalidated_fp8"] if precision == "fp8" else []
        return run_recipe(words, world_size=2, env={**engine_env(config), **env}, timeout=250)

    whole, cut = folder / "whole", folder / "cut"
    ended = train(whole)
    assert ended.codes == [0, 0], ended.output
    ended = train(cut, MPRECIPES_FAULT="kill@step:10")
    assert ended.codes == [-9, -9], ended.output
    ended = train(cut)
    assert ended.codes == [0, 0], ended.output
    assert outcomes(cut) == ["killed", "finished"]
    report = resume_report(cut, 1)
    assert_released(report)
    assert (report["step"], report["replayed_steps"]) == (8, 2)
    assert_same_run(whole, cut)
    found = manifest(cut, 16)
    assert found["scaler"] == manifest(whole, 16)["scaler"]
    assert (found["precision"]["mode"], found["topology"]["sharding"]) == (precision, engine)
    measured = found["topology"]["read_back"]
    assert measured["compute_dtype"] == COMPUTE[precision]
    assert measured["master_dtype"] == measured["reduce_dtype"] == "float32"
    assert set(found["params"].values()) == {"float32"}
    check_layers(whole)
    if precision == "fp8":
        assert len(found["precision"]["fp8"]["converted"]) == 14
        return
    lines = list(journal(whole).values())
    scales, skips = [[line[key] for line in lines] for key in ("loss_scale", "skipped")]
    assert scales[:3] == [2.0**21, 2.0**20, 2.0**19] and len(set(scales[9:])) > 1
    assert any(skips[:8]) and not all(skips)
    assert lines[-1]["updates"] == 16 - sum(skips)


def check_layers(run):
    """Every fourth step names the norm of each layer's whole gradient: their root sum is known."""
    lines, due = journal(run), 0
    found, _ = read_metrics(run / "metrics.jsonl")
    for values in found:
        if values.get("precision/nonfinite_gradients") != 0:
            continue
        norms = [v for name, v in values.items() if "/layer_grad_norm/" in name]
        assert len(norms) == 4  # two layers, final norm, tied embedding
        whole = sum(norm**2 for norm in norms) ** 0.5
        assert whole == pytest.approx(lines[values["step"]]["grad_norm"], rel=1e-5)
        assert 0 <= values["precision/vanishing_updates_masters"] < 0.05
        assert 0 <= values["precision/gradient_underflow_fp16"] < 1
        due += 1
    assert due


@pytest.mark.faults
@pytest.mark.parametrize(("engine", "precision"), COVERING)
def test_covering_pairs(tmp_path, engine, precision):
    """FP8 on FSDP2, FP16 on ZeRO-2: state, scale and every loss as in the run that was not cut."""
    check(tmp_path, engine, precision)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "precision"), REST)
def test_the_other_pairs(tmp_path, engine, precision):
    """Every other pair that the table offers."""
    check(tmp_path, engine, precision)
