# SPDX-License-Identifier: Apache-2.0
"""What the launcher was asked for."""

import pytest

from mprecipes.compute.launcher import (
    asked_by_launcher,
    cpu_threads,
    deepspeed_file,
    is_set,
    read_flags,
    refuse_other_launcher,
    refuse_overrides,
)
from mprecipes.errors import ConfigError

LAUNCHER = ["python", "/x/bin/accelerate", "launch"]


def test_flags_are_read_up_to_the_script():
    """The script's own --config_file is not the launcher's; `=` and `-` spell the same flag."""
    words = ["--config_file", "cpu.yaml", "--num-processes=2", "a.py", "--mixed_precision", "x"]
    assert read_flags([*LAUNCHER, *words]) == {"config_file": "cpu.yaml", "num_processes": "2"}


def test_the_config_file_of_the_home_folder_is_known(tmp_path, monkeypatch):
    """Without --config_file the launcher reads what `accelerate config` wrote; not with --cpu."""
    written = tmp_path / "default_config.yaml"
    written.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n")
    words = [*LAUNCHER]
    monkeypatch.setattr("psutil.Process.cmdline", lambda self: [*words, "a.py"])
    asked = {"origin": str(written), "use_cpu": True, "num_processes": 2}
    assert asked_by_launcher(str(written)) == {**asked, "distributed_type": "MULTI_GPU"}
    words.append("--cpu")
    assert asked_by_launcher(str(written)) == {"origin": "accelerate launch", "use_cpu": True}
    words[-1:] = ["--config_file", "absent.yaml"]
    assert asked_by_launcher(str(written)) == {"origin": "absent.yaml", "use_cpu": False}


def test_deepspeeds_own_launcher_is_refused():
    """It would let each machine train alone; accelerate's own passes."""
    refuse_other_launcher([*LAUNCHER, "a.py"])
    words = ["python3", "-u", "-m", "deepspeed.launcher.launch", "--world_info=eyJ9", "a.py"]
    with pytest.raises(ConfigError) as caught:
        refuse_other_launcher(words)
    assert caught.value.found == "DeepSpeed's own launcher started this process"
    assert caught.value.expected == "accelerate's launcher on every machine"
    assert caught.value.where == "deepspeed_config of the accelerate config"
    assert "deepspeed_multinode_launcher: standard" in caught.value.action


def test_only_true_and_1_are_set(monkeypatch):
    """The launcher exports `false` as text."""
    for text, wanted in (("true", True), ("1", True), ("false", False)):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", text)
        assert is_set("ACCELERATE_USE_FSDP") == wanted
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    assert not is_set("ACCELERATE_USE_FSDP")


def test_deepspeed_settings_are_found_beside_the_accelerate_config(tmp_path, monkeypatch):
    """A relative path holds from the working directory and from the repository of the config."""
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs/z.json").write_text('{"zero_optimization": {"stage": 2}}')
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds_configs/z.json")
    config = str(tmp_path / "accelerate_configs/zero2.yaml")
    settings, place = deepspeed_file(config)
    assert settings == {"zero_optimization": {"stage": 2}}
    assert place == str(tmp_path / "ds_configs/z.json")
    monkeypatch.chdir(tmp_path)
    assert deepspeed_file("elsewhere.yaml")[1] == "ds_configs/z.json"


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, "z.json, which is not there"), ("{", "not JSON"), ("[]", "not an object")],
)
def test_deepspeed_settings_that_cannot_be_read_are_refused(tmp_path, monkeypatch, text, found):
    """A missing file, broken JSON and another JSON value are named with their place."""
    if text is not None:
        (tmp_path / "z.json").write_text(text)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "z.json")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        deepspeed_file("zero2.yaml")
    error = caught.value
    assert found in error.found and error.where in ("z.json", "zero2.yaml")
    assert "a DeepSpeed config" in error.expected and "ds_configs/zero2.json" in error.action


@pytest.mark.parametrize(
    ("variable", "value", "mode", "owner"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "bf16", "2 by the recipe"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "bf16", "torch_compile of the recipe"),
        ("NVIDIA_TF32_OVERRIDE", "0", "tf32", "tf32 by the recipe"),
        ("ACCELERATE_FP8_BACKEND", "TE", "fp8", "fp8_recipe of the option numerics"),
    ],
)
def test_a_variable_that_would_overrule_the_recipe_is_refused(
    monkeypatch, variable, value, mode, owner
):
    """accelerate prefers its variable to the argument it is given, and says nothing."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        refuse_overrides(2, mode)
    assert caught.value.found == f"{variable} is {value}"
    assert owner in caught.value.expected
    assert caught.value.where == "environment of this launch"
    assert f"unset {variable}" in caught.value.action


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"),
        ("ACCELERATE_DYNAMO_BACKEND", "NO"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
        ("ACCELERATE_FP8_BACKEND", "TE"),
    ],
)
def test_a_variable_that_says_what_the_recipe_says_is_none_of_its_business(
    monkeypatch, variable, value
):
    """The launcher itself exports some of them."""
    monkeypatch.setenv(variable, value)
    refuse_overrides(2, "tf32")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    refuse_overrides(2, "bf16")


@pytest.mark.parametrize("text", ["two", "0", "-1", "1.5"])
def test_threads_that_are_no_number_are_refused(monkeypatch, text):
    """A share of the cores unless the variable says another whole number."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("MPRECIPES_CPU_THREADS", raising=False)
    assert [cpu_threads(2), cpu_threads(16)] == [4, 1]
    monkeypatch.setenv("MPRECIPES_CPU_THREADS", "3")
    assert cpu_threads(2) == 3
    monkeypatch.setenv("MPRECIPES_CPU_THREADS", text)
    with pytest.raises(ConfigError) as caught:
        cpu_threads(2)
    assert caught.value.found == f"MPRECIPES_CPU_THREADS is {text}"
    assert "whole number from 1" in caught.value.expected and "8 cores" in caught.value.action
