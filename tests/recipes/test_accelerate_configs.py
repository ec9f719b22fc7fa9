# SPDX-License-Identifier: Apache-2.0
"""Every accelerate config is launched; what it asked for is what is measured, or nothing trains.

GPUs are hidden, so that each file is tried with two processes wherever the tests run.
"""

import re

import pytest
import yaml

from tests.fix64 import RECIPE, ROOT, options, write_rows
from tests.launching import launch, run_command
from tests.reading import manifest

pytestmark = pytest.mark.launch
CONFIGS = ROOT / "accelerate_configs"
# What a file asks for: with precision left to the recipe, the recipe is asked for fp32.
MODES = {
    "cpu": "fp32", "cpu_bf16": "bf16", "cpu_fp16": "fp16", "cpu_fp8": "fp8",
    "ddp": "fp32", "ddp_bf16": "bf16", "ddp_fp16": "fp16", "ddp_fp8": "fp8",
}  # fmt: skip
PRODUCTS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
# Engines that shard: what accelerate calls them.
SHARDED = {
    "fsdp2": "FSDP",
    **dict.fromkeys(("zero1", "zero2", "zero3", "zero3_offload"), "DEEPSPEED"),
}
SHARDED_MODES = [
    (name, mode)
    for name in SHARDED
    for mode in ("fp32", "bf16", "fp16", "fp8")
    if mode != "fp8" or name == "fsdp2"  # a DeepSpeed file cannot name it; the recipe can
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 16)


def words(rows, run, **changed):
    return options(rows, run, **{"max_steps": 2, "per_device_train_batch_size": 2, **changed})


def refused(run, command, env=None):
    """Runs a command line that must train nothing; gives its output with single spaces."""
    done = run_command(command, env=env)
    assert done.returncode != 0, done.output
    assert not (run / "journal").exists()
    return re.sub(r"\s+", " ", done.output)


def accelerate(*flags):
    return ["accelerate", "launch", "--main_process_port", "0", *flags, RECIPE]


def test_these_are_all_the_configs():
    """The list of this file leaves no accelerate config out."""
    sharded = [name if mode == "fp32" else f"{name}_{mode}" for name, mode in SHARDED_MODES]
    assert sorted(path.stem for path in CONFIGS.iterdir()) == sorted([*MODES, *sharded])
    found = sorted(path.stem for path in (ROOT / "ds_configs").iterdir())
    assert found == sorted(name for name in sharded if name.startswith("zero"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), SHARDED_MODES)
def test_what_is_asked_of_a_sharded_engine_is_what_is_measured(rows, tmp_path, name, mode):
    """Engine, stage, clipping, accumulation, batch and dtypes are read back from what runs."""
    suffix = "" if mode == "fp32" else f"_{mode}"
    precision = {"precision": "fp32"} if mode == "fp32" else {}
    done = launch(
        RECIPE,
        [
            *words(rows, tmp_path / "run", global_batch_size=8, max_grad_norm=0.5, **precision),
            *(["--allow_unvalidated_fp8"] if mode == "fp8" else []),
        ],
        config=CONFIGS / f"{name}{suffix}.yaml",
        num_processes=2,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.output
    found = manifest(tmp_path / "run", 2)
    topology = found["topology"]
    assert (topology["sharding"], topology["engine"]) == (name, SHARDED[name])
    assert (topology["world_size"], topology["backend"]) == (2, "gloo")
    assert (found["precision"]["mode"], topology["accumulation"]) == (mode, 2)
    assert set(found["params"].values()) == {"float32"}
    assert (found["scaler"] is not None) == (mode == "fp16")
    assert ("fp8" in found["precision"]) == (mode == "fp8")
    if name == "fsdp2":
        assert topology["read_back"] == {
            "compute_dtype": PRODUCTS[mode],
            "reduce_dtype": "float32",
            "output_dtype": "float32",
            "master_dtype": "float32",
        }
    else:
        assert topology["read_back"] == {
            "zero_stage": int(name[4]),
            "gradient_clipping": 0.5,
            "clip_grad of the optimizer": 0.5,
            "gradient_accumulation_steps": 2,
            "train_micro_batch_size_per_gpu": 2,
            "train_batch_size": 8,
            "compute_dtype": PRODUCTS[mode],
            "accumulate_dtype": "float32",
            "reduce_dtype": "float32",
            "master_dtype": "float32",
        }


@pytest.mark.parametrize(
    ("name", "num_processes"),
    [
        pytest.param(name, n, marks=[pytest.mark.slow] * (n == 1 and mode in ("fp16", "fp8")))
        for name, mode in MODES.items()
        for n in (1, 2)
    ],
)
def test_what_is_asked_is_what_is_measured(rows, tmp_path, name, num_processes):
    """Processes, engine, backend, accumulation, mode and matmul dtype are as asked."""
    mode = MODES[name]
    said = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert said.get("mixed_precision") == (None if mode == "fp32" else mode)
    precision = {"precision": "fp32"} if mode == "fp32" else {}
    flags = ["--allow_unvalidated_fp8"] if mode == "fp8" else []
    done = launch(
        RECIPE,
        [*words(rows, tmp_path / "run", global_batch_size=4, **precision), *flags],
        config=CONFIGS / f"{name}.yaml",
        num_processes=num_processes,
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.output
    found = manifest(tmp_path / "run", 2)
    topology = found["topology"]
    assert topology["world_size"] == topology["local_world_size"] == num_processes
    assert topology["engine"] == "MULTI_CPU"  # accelerate's name for DDP over gloo, also of one
    assert (topology["device"], topology["backend"]) == ("cpu", "gloo")
    assert topology["accumulation"] == 2 // num_processes
    assert found["data"]["global_batch"] == 4
    assert found["precision"]["mode"] == mode
    assert found["precision"]["compute_dtype"] == PRODUCTS[mode]
    assert found["precision"]["reduce_dtype"] == "float32"
    assert (found["scaler"] is not None) == (mode == "fp16")
    assert ("fp8" in found["precision"]) == (mode == "fp8")
    assert set(found["params"].values()) == {"float32"}
    assert {entry["rank"] for entry in found["files"]} == set(range(num_processes))


def test_the_cpu_flag_that_starts_one_process_is_refused(rows, tmp_path):
    """`accelerate launch --cpu --num_processes 2` starts one process in silence: refused."""
    run = tmp_path / "run"
    command = [*accelerate("--cpu", "--num_processes", "2"), *words(rows, run)]
    output = refused(run, command, env={"HF_HOME": str(tmp_path)})
    assert "accelerate launch: 1 process runs after asking for 2 (accelerate launch)" in output
    assert "expected: WORLD_SIZE 2" in output
    assert "next: use accelerate_configs/cpu.yaml or ddp.yaml" in output


def test_a_multi_cpu_config_is_refused(rows, tmp_path):
    """MULTI_CPU with 2 processes starts one in silence too; refused with its file's name."""
    config, run = tmp_path / "multi_cpu.yaml", tmp_path / "run"
    said = {"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2, "num_machines": 1}
    config.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **said}))
    output = refused(run, [*accelerate("--config_file", config), *words(rows, run)])
    assert f"accelerate launch: 1 process runs after asking for 2 ({config})" in output
    assert "expected: WORLD_SIZE 2" in output
    assert "next: use accelerate_configs/cpu.yaml or ddp.yaml" in output


def test_fp8_that_was_not_validated_is_refused(rows, tmp_path):
    """A launcher's fp8 alone trains nothing: the record it needs and the flag are named."""
    run = tmp_path / "run"
    flags = ("--config_file", CONFIGS / "cpu.yaml", "--mixed_precision", "fp8")
    output = refused(run, [*accelerate(*flags), *words(rows, run)])
    assert "FP8 was not validated for this architecture, recipe version and fp8_recipe" in output
    assert "expected: a validation record of pretrain_causal_lm" in output
    assert "or add --allow_unvalidated_fp8 for this launch" in output


def test_a_launcher_against_the_recipe_is_refused_with_both_sources(rows, tmp_path):
    """bf16 in the launcher's file and fp32 on the command line: both places are named."""
    run, config = tmp_path / "run", CONFIGS / "cpu_bf16.yaml"
    command = [*accelerate("--config_file", config), *words(rows, run, precision="fp32")]
    output = refused(run, command)
    assert (
        "precision: precision is 'fp32' (command line) but the launcher says 'bf16' "
        f"({config})" in output
    )
    assert "expected: precision named in one place, or the same in both" in output
    assert "next: launch with a config silent about precision, or drop --precision fp32" in output
