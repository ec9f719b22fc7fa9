# SPDX-License-Identifier: Apache-2.0
"""The table of engines, and the settings DeepSpeed gets from the recipe."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mprecipes.compute.engines import (
    ENGINES,
    Engine,
    asked_engine,
    deepspeed_settings,
    read_back,
    require_pair,
    said_precision,
)
from mprecipes.compute.precision import MODES
from mprecipes.compute.ranks import BatchPlan
from mprecipes.errors import ConfigError

PLAN = BatchPlan(micro_batch=2, accumulation=4, world_size=2, rank=0)


@pytest.fixture(autouse=True)
def quiet_launcher(monkeypatch):
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        monkeypatch.delenv(f"ACCELERATE_USE_{name}", raising=False)


def zero_file(tmp_path, monkeypatch, settings):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(settings))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    return path


def test_silence_is_ddp_and_fsdp_must_be_version_2(monkeypatch):
    """Each engine is known by what the launcher exports; FSDP1 is refused by name."""
    assert asked_engine({"origin": "cpu.yaml"}).name == "ddp"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert asked_engine({"origin": "fsdp2.yaml"}).name == "fsdp2"
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ConfigError) as caught:
        asked_engine({"origin": "old.yaml"})
    assert caught.value.found == "the launcher asks for FSDP version 1 (old.yaml)"
    assert "fsdp_version 2" in caught.value.expected


@pytest.mark.parametrize(
    ("about", "name"),
    [
        ({"stage": 1}, "zero1"),
        ({"stage": 3}, "zero3"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, "zero3_offload"),
    ],
)
def test_the_stage_is_what_deepspeeds_file_says(tmp_path, monkeypatch, about, name):
    """Stage and offload come from the file the accelerate config points to."""
    path = zero_file(tmp_path, monkeypatch, {"zero_optimization": about})
    engine = asked_engine({"origin": "x.yaml"})
    assert (engine.name, engine.origin) == (name, str(path))
    assert engine.zero_stage == about["stage"]


@pytest.mark.parametrize(
    "about", [{}, {"stage": 0}, {"stage": 3, "offload_optimizer": {"device": "nvme"}}]
)
def test_stages_that_are_not_driven_are_refused(tmp_path, monkeypatch, about):
    """Stage 0 has no sharding, and NVMe state is not in memory when a save begins."""
    zero_file(tmp_path, monkeypatch, {"zero_optimization": about})
    with pytest.raises(ConfigError) as caught:
        asked_engine({"origin": "x.yaml"})
    assert "stages 1 to 3 without NVMe" in caught.value.expected
    assert caught.value.where == "accelerate config"


@pytest.mark.parametrize("name", ["MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_other_parallelism_is_refused(monkeypatch, name):
    """Megatron, context and tensor parallelism are refused with a message that says so."""
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(ConfigError) as caught:
        asked_engine({"origin": "x.yaml"})
    assert "(x.yaml)" in caught.value.found
    assert "an engine that is driven here: ddp, fsdp2, zero1" in caught.value.expected


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP"])
def test_an_engine_that_the_launcher_dropped_is_refused(kind):
    """The file asks for ZeRO or FSDP and plain DDP would run: refused before anything is built."""
    with pytest.raises(ConfigError) as caught:
        asked_engine({"origin": "zero3.yaml", "distributed_type": kind})
    error = caught.value
    assert error.found == f"plain data parallel would run after asking for {kind} (zero3.yaml)"
    assert error.expected == f"ACCELERATE_USE_{kind}=true from the launcher"
    assert "--cpu" in error.action


def test_a_pair_that_does_not_work_is_refused_with_its_reason():
    """The table's reason and what works instead are in the message."""
    for name in ("ddp", "fsdp2", "zero1", "zero2", "zero2_offload"):
        for mode in MODES.values():
            require_pair(ENGINES[name], mode)
    with pytest.raises(ConfigError) as caught:
        require_pair(ENGINES["zero3"], MODES["fp8"])
    assert "Float8Linear holds each gathered weight until its backward" in caught.value.found
    assert caught.value.expected == "on zero3 one of fp32, tf32, bf16, fp16"


def test_the_page_has_the_same_table():
    """docs/engines.md offers what `ENGINES` offers, engine by engine and mode by mode."""
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    head, *rows = [line for line in lines if len(line) == 2 + len(MODES)]
    assert head[2:] == list(MODES)
    told = {row[0].split("`")[1]: row[2:] for row in rows}
    assert list(told) == ["ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload"]
    for name, words in told.items():
        refused = ENGINES[name].refused
        assert words == ["refused" if mode in refused else "yes" for mode in MODES], name


def engine(**settings):
    row = ENGINES["zero2"]
    base = {"zero_optimization": {"stage": 2}}
    return Engine("zero2", row.distributed_types, {}, "ds.json", base | settings)


def test_the_recipes_numbers_are_written():
    """ "auto" and absent are filled from the recipe; FP32 accumulation and reduction as well."""
    written = deepspeed_settings(engine(gradient_clipping="auto"), MODES["bf16"], PLAN, 0.5)
    assert written["gradient_clipping"] == 0.5
    assert written["gradient_accumulation_steps"] == 4
    assert (written["train_micro_batch_size_per_gpu"], written["train_batch_size"]) == (2, 16)
    assert written["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert written["data_types"] == {"grad_accum_dtype": "fp32"}
    assert written["communication_data_type"] == "fp32"
    assert deepspeed_settings(engine(), MODES["fp32"], PLAN, None)["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("mode", "bf16", "fp16"),
    [("fp32", False, False), ("tf32", False, False), ("bf16", True, False), ("fp8", True, False),
     ("fp16", False, True)],
)  # fmt: skip
def test_the_working_copies_follow_the_mode(mode, bf16, fp16):
    """FP8 has BF16 working copies; FP16's static scale of 1 leaves scaling to the project."""
    written = deepspeed_settings(engine(), MODES[mode], PLAN, 1.0)
    assert written["bf16"]["enabled"] is bf16
    assert written["fp16"] == {"enabled": fp16, "loss_scale": 1.0}


@pytest.mark.parametrize(
    ("key", "value", "option"),
    [
        ("loss_scale", 0, "loss_scale"),
        ("initial_scale_power", 12, "initial_loss_scale"),
        ("loss_scale_window", 500, "loss_scale_growth_interval"),
        ("hysteresis", 2, "loss_scale_hysteresis"),
        ("min_loss_scale", 1, "loss_scale_floor"),
    ],
)
def test_a_loss_scale_in_deepspeeds_file_is_refused(key, value, option):
    """The scale is said in the option `numerics`; a second place is named, not dropped."""
    with pytest.raises(ConfigError) as caught:
        deepspeed_settings(engine(fp16={"enabled": True, key: value}), MODES["fp16"], PLAN, 1.0)
    assert caught.value.found == f"fp16.{key} {value} (ds.json)"
    assert f"write {option} in numerics" in caught.value.action


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("fp16", "fp16_master_weights_and_grads", True),
        ("bf16", "immediate_grad_update", True),
        ("torch_autocast", "enabled", True),
        ("data_types", "grad_accum_dtype", "bf16"),
    ],
)
def test_more_about_precision_in_deepspeeds_file_is_refused(section, key, value):
    """What would be overwritten is named instead; what is off or "auto" is no second answer."""
    for said in (False, None, "auto"):
        deepspeed_settings(engine(**{section: {key: said}}), MODES["bf16"], PLAN, 1.0)
    with pytest.raises(ConfigError) as caught:
        deepspeed_settings(engine(**{section: {key: value}}), MODES["bf16"], PLAN, 1.0)
    assert caught.value.found == f"{section}.{key} {value} (ds.json)"
    assert caught.value.action.startswith("leave it out of the DeepSpeed file; see docs")


@pytest.mark.parametrize(
    ("key", "said", "found", "expected"),
    [
        ("gradient_clipping", 1.0, "gradient_clipping 1.0 (ds.json)", "max_grad_norm 0.5"),
        (
            "gradient_accumulation_steps",
            2,
            "gradient_accumulation_steps 2 (ds.json)",
            "gradient_accumulation_steps 4",
        ),
        (
            "train_micro_batch_size_per_gpu",
            8,
            "train_micro_batch_size_per_gpu 8 (ds.json)",
            "per_device_train_batch_size 2",
        ),
    ],
)
def test_a_file_that_says_otherwise_is_refused(key, said, found, expected):
    """Cases H03 and H04: two sources of truth are named, not silently resolved."""
    with pytest.raises(ConfigError) as caught:
        deepspeed_settings(engine(**{key: said}), MODES["bf16"], PLAN, 0.5)
    error = caught.value
    assert (error.found, error.expected) == (found, f"{expected}, as the recipe says")
    assert error.where == key and '"auto"' in error.action


def test_the_file_may_name_the_precision():
    """Beside a deepspeed_config_file the launcher takes no mixed_precision: the file names it."""
    assert said_precision(engine(bf16={"enabled": True})) == "bf16"
    assert said_precision(engine(fp16={"enabled": True})) == "fp16"
    assert said_precision(engine(bf16={"enabled": "auto"})) is None
    assert said_precision(ENGINES["ddp"]) is None


def running(**changed):
    """A stand-in of an engine that does what was asked."""
    values = {"clip": 0.5, "accumulation": 4, "dtype": torch.bfloat16, "accum": torch.float32}
    values |= changed
    zero = SimpleNamespace(
        clip_grad=values["clip"],
        gradient_accumulation_dtype=values["accum"],
        single_partition_of_fp32_groups=[torch.zeros(2)],
    )
    return SimpleNamespace(
        optimizer=zero,
        module=torch.nn.Linear(2, 2).to(values["dtype"]),
        zero_optimization_stage=lambda: 2,
        gradient_clipping=lambda: values["clip"],
        gradient_accumulation_steps=lambda: values["accumulation"],
        train_micro_batch_size_per_gpu=lambda: 2,
        train_batch_size=lambda: 16,
        communication_data_type=torch.float32,
    )


def test_the_running_engine_is_read_back():
    """What was asked is noted as measured."""
    found = read_back(engine(), running(), MODES["bf16"], PLAN, 0.5)
    assert found["gradient_clipping"] == 0.5 and found["accumulate_dtype"] == "float32"
    assert (found["compute_dtype"], found["master_dtype"]) == ("bfloat16", "float32")


@pytest.mark.parametrize(
    ("changed", "found", "expected"),
    [
        ({"clip": 1.0}, "gradient_clipping measured as 1.0", "gradient_clipping 0.5"),
        (
            {"accum": torch.bfloat16},
            "accumulate_dtype measured as bfloat16",
            "accumulate_dtype float32",
        ),
        ({"dtype": torch.float32}, "compute_dtype measured as float32", "compute_dtype bfloat16"),
        (
            {"accumulation": 1},
            "gradient_accumulation_steps measured as 1",
            "gradient_accumulation_steps 4",
        ),
    ],
)
def test_an_engine_that_does_otherwise_is_refused(changed, found, expected):
    """Case F05 and the silent 1.0: a difference between asked and measured ends the launch."""
    with pytest.raises(ConfigError) as caught:
        read_back(engine(), running(**changed), MODES["bf16"], PLAN, 0.5)
    assert caught.value.found == found
    assert caught.value.expected == f"{expected}, as the recipe says"
