# SPDX-License-Identifier: Apache-2.0
"""Precision is named in one place, and measured."""

import contextlib

import pytest
import torch

from mprecipes.compute.precision import (
    MODES,
    advice_on,
    forbid_reduced_precision,
    measure_mode,
    require_hardware,
    resolve_mode,
    why_not,
)
from mprecipes.errors import ConfigError

CPU = torch.device("cpu")


def resolve(asked, launcher):
    return resolve_mode(asked, origin="my.yaml", launcher=launcher, launcher_origin="cpu_bf16.yaml")


@pytest.mark.parametrize(
    ("asked", "launcher", "mode"),
    [
        ("auto", None, "bf16"),
        ("auto", "no", "bf16"),
        ("auto", "bf16", "bf16"),
        ("fp32", "no", "fp32"),
        ("bf16", "bf16", "bf16"),
        ("tf32", None, "tf32"),
        ("auto", "fp16", "fp16"),
        ("auto", "fp8", "fp8"),
    ],
)
def test_a_silent_launcher_leaves_the_choice_to_the_recipe(asked, launcher, mode):
    """`no` from the launcher counts as silence, and silence on both sides is bf16."""
    assert resolve(asked, launcher).name == mode


def test_two_different_answers_are_refused_with_both_sources():
    """fp32 in a YAML against bf16 in the launcher's config names both files."""
    with pytest.raises(ConfigError) as caught:
        resolve("fp32", "bf16")
    error = caught.value
    assert "'fp32' (my.yaml)" in error.found and "'bf16' (cpu_bf16.yaml)" in error.found
    assert "one place" in error.expected
    assert error.where == "precision"
    assert "--precision fp32" in error.action


def test_a_mode_that_is_not_offered_is_refused():
    """What a launcher may say one day is not quietly trained in something else."""
    with pytest.raises(ConfigError, match="'int8' \\(cpu_bf16.yaml\\) is not offered") as caught:
        resolve("auto", "int8")
    assert caught.value.expected == "one of fp32, tf32, bf16, fp16, fp8"


def test_tf32_needs_hardware_that_has_it():
    """On a CPU tf32 would be fp32 under another name."""
    with pytest.raises(ConfigError) as caught:
        require_hardware(MODES["tf32"], CPU)
    assert "device cpu" in caught.value.found and "8.0" in caught.value.expected


def test_measured_equals_asked_for_bf16_and_fp32():
    """Matrix products come out as bfloat16 under autocast and as float32 without."""
    torch.set_float32_matmul_precision("highest")
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    assert measure_mode(MODES["bf16"], CPU, autocast)["compute_dtype"] == "bfloat16"
    measured = measure_mode(MODES["fp32"], CPU, contextlib.nullcontext())
    assert (measured["compute_dtype"], measured["float32_matmul"]) == ("float32", "highest")


def test_a_mode_that_is_silently_off_is_an_error():
    """Sabotage: bf16 without autocast is measured as float32 and refused."""
    with pytest.raises(ConfigError) as caught:
        measure_mode(MODES["bf16"], CPU, contextlib.nullcontext())
    assert "measured as float32" in caught.value.found and caught.value.expected == "bfloat16"


def test_every_mode_keeps_fp32_masters_accumulation_and_reduction():
    """The table promises FP32 masters and gradients in each row."""
    for mode in MODES.values():
        assert mode.master_dtype == mode.accumulate_dtype == mode.reduce_dtype == "float32"
        assert mode.gradient_dtype == mode.moment_dtype == "float32"


def test_right_values_of_the_formats():
    """1 + 1e-6 is a number of FP32 alone; 1 + 2^-9 one of FP16 and not of BF16."""
    assert torch.tensor(1 + 1e-6, dtype=torch.float32).item() != 1.0
    assert torch.tensor(1 + 1e-6, dtype=torch.bfloat16).item() == 1.0
    assert torch.tensor(1 + 1e-6, dtype=torch.float16).item() == 1.0
    assert torch.tensor(1 + 2**-9, dtype=torch.float16).item() == 1 + 2**-9
    assert torch.tensor(1 + 2**-9, dtype=torch.bfloat16).item() == 1.0


def test_bits_of_the_table_are_those_of_the_formats():
    """Mantissa bits follow from torch's own eps; exponent bits are what is left of the width."""
    for name, dtype in (
        ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16),
        ("fp8", torch.float8_e4m3fn),
    ):  # fmt: skip
        info, mode = torch.finfo(dtype), MODES[name]
        assert info.eps == 2.0**-mode.mantissa_bits
        assert mode.exponent_bits == info.bits - 1 - mode.mantissa_bits


def test_a_cpu_computes_fp16_slowly_and_emulates_fp8():
    """The note says what runs in place of hardware; a package that is not there is a refusal."""
    assert why_not(MODES["fp16"], CPU) == (
        None, "without FP16 units: about 12 times slower than fp32",
    )  # fmt: skip
    refusal, note = why_not(MODES["fp8"], CPU)
    assert (refusal, note[:8]) == (None, "emulated")


def test_fp8_without_its_package_is_refused(monkeypatch):
    """The extra to install is named."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="fp8: no package torchao") as caught:
        require_hardware(MODES["fp8"], CPU)
    assert "mprecipes[fp8]" in caught.value.action and "torchao" in caught.value.expected
    assert caught.value.where == "precision"


def test_fp16_where_bf16_runs_is_worth_a_line():
    """One line of advice for fp16, none for the others; reduced precision in sums is off."""
    assert "needs no loss scale" in advice_on(MODES["fp16"], CPU)
    assert advice_on(MODES["bf16"], CPU) is None
    forbid_reduced_precision()
    measured = measure_mode(MODES["fp32"], CPU, contextlib.nullcontext())
    assert measured["allow_bf16_reduced_precision_reduction"] is False
    assert measured["allow_fp16_reduced_precision_reduction"] is False
