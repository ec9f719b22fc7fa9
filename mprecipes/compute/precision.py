# SPDX-License-Identifier: Apache-2.0
"""What a precision mode means: one row of a table, chosen once, read by everyone else.

Weights and optimizer state are FP32 masters in every mode; gradients are accumulated over
micro-batches in FP32. A mode only says how matrix multiplications are computed.
"""

import importlib.util
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mprecipes.compute.policy import NumericsPolicy
from mprecipes.errors import ConfigError

REDUCE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class PrecisionMode:
    """One row of the table of modes.

    Attributes:
        autocast: what `Accelerator(mixed_precision=...)` is built with.
        compute_dtype: dtype that a matrix multiplication of two FP32 tensors gives in this mode.
        float32_matmul: `torch.set_float32_matmul_precision` value.
        exponent_bits, mantissa_bits: of the operands of a matrix multiplication.
        limitation: what a person should know before choosing it.
        gradient_dtype: of the gradient the optimizer reads; inside backward it is `compute_dtype`.
        scaler: how the loss is scaled.
        replay_tolerance: relative difference allowed between the losses of the same step computed
            on another number of processes; bitwise equality is asked for where nothing changed.
    """

    name: str
    autocast: str
    compute_dtype: str
    float32_matmul: str
    replay_tolerance: float
    needs: str
    exponent_bits: int
    mantissa_bits: int
    limitation: str
    master_dtype: str = "float32"
    gradient_dtype: str = "float32"
    accumulate_dtype: str = "float32"
    reduce_dtype: str = "float32"
    moment_dtype: str = "float32"
    scaler: str | None = None

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What autocast makes products of; None where the mode has none."""
        dtype: torch.dtype = getattr(torch, self.compute_dtype)
        return None if self.autocast == "no" else dtype

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


MODES = {
    mode.name: mode
    for mode in (
        PrecisionMode(
            "fp32", "no", "float32", "highest", 1e-5, "any device", 8, 23,
            "the reference; slowest, and twice the memory for activations",
        ),
        PrecisionMode(
            "tf32", "no", "float32", "high", 1e-3, "a CUDA device of capability 8.0+", 8, 10,
            "FP32 storage, products rounded to 10 bits; memory of FP32",
        ),
        PrecisionMode(
            "bf16", "bf16", "bfloat16", "highest", 1e-2, "a CPU, or CUDA 8.0+", 8, 7,
            "8 significant bits: updates below 1/256 of a weight vanish without FP32 masters",
        ),
        PrecisionMode(
            "fp16", "fp16", "float16", "highest", 5e-3, "any CPU, or CUDA 7.0+", 5, 10,
            "largest value 65504, smallest 2^-24: needs a loss scale; skips overflowing steps",
            scaler="dynamic",
        ),
        PrecisionMode(
            "fp8", "bf16", "bfloat16", "highest", 5e-2,
            "torchao, and CUDA 8.9+ or emulation", 4, 3,
            "fast, not yet stable: needs a validation record; Linear of 16-multiple sizes only",
        ),
    )
}  # fmt: skip


def resolve_mode(
    asked: str, *, origin: str, launcher: str | None, launcher_origin: str
) -> PrecisionMode:
    """Gives the mode of a launch from the recipe's option and what the launcher said.

    Args:
        asked: the recipe option `precision`, `auto` or a mode.
        origin: where that value came from: a file, the command line or the default.
        launcher: ACCELERATE_MIXED_PRECISION; the launcher exports `no` both for an explicit `no`
            and for silence, so `no` counts as silence.
        launcher_origin: the accelerate config file or flag that said it.

    Raises:
        ConfigError: recipe and launcher contradict each other, or the mode is not offered.
    """
    said = None if launcher in (None, "", "no") else launcher
    if asked != "auto" and said is not None and said != asked:
        raise ConfigError(
            f"precision is {asked!r} ({origin}) but the launcher says {said!r} ({launcher_origin})",
            expected="precision named in one place, or the same in both",
            where="precision",
            action=f"launch with a config silent about precision, or drop --precision {asked}",
        )
    name = (said or "bf16") if asked == "auto" else asked
    if name not in MODES:
        raise ConfigError(
            f"precision {name!r} ({launcher_origin if asked == 'auto' else origin}) is not offered",
            expected=f"one of {', '.join(MODES)}",
            where="precision",
            action="choose bf16, the default; it needs no loss scale",
        )
    return MODES[name]


def why_not(mode: PrecisionMode, device: torch.device) -> tuple[str | None, str | None]:
    """Gives why this device cannot compute a mode, and else what it does in place of hardware.

    Returns:
        `(refusal, None)`, or `(None, note)` where the mode runs in a slower way, or both None.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    found = f"device {device.type}" + (f" of capability {capability}" if capability else "")
    if mode.name == "tf32" and (capability is None or capability < (8, 0)):
        return found, None
    if mode.name == "bf16" and capability is not None and capability < (8, 0):
        return found, None
    if mode.name == "fp16":
        if capability is not None and capability < (7, 0):
            return found, None
        return None, None if capability else "without FP16 units: about 12 times slower than fp32"
    if mode.name == "fp8":
        if importlib.util.find_spec("torchao") is None:
            return "no package torchao", None
        emulated = capability is None or capability < (8, 9)
        return None, "emulated: FP8 rounding, BF16 products, no speed" if emulated else None
    return None, None


def require_hardware(mode: PrecisionMode, device: torch.device) -> None:
    """Refuses a mode this device cannot compute, before anything is built.

    Raises:
        ConfigError: naming what was found and what the mode needs.
    """
    refusal, _ = why_not(mode, device)
    if refusal is None:
        return
    action = "use --precision fp32 (or bf16 where the device has it)"
    raise ConfigError(
        f"{mode.name} on {refusal}" if refusal.startswith("device") else f"{mode.name}: {refusal}",
        expected=mode.needs,
        where="precision",
        action="pip install 'mprecipes[fp8]'" if "torchao" in refusal else action,
    )


def advice_on(mode: PrecisionMode, device: torch.device) -> str | None:
    """Gives one line for a person who chose a mode where a better one runs; None for nothing."""
    if mode.name == "fp16" and why_not(MODES["bf16"], device)[0] is None:
        return (
            "precision fp16 was chosen where bf16 runs: bf16 has the range of fp32 and needs no "
            "loss scale; choose fp16 only to compare, or for its 3 more bits"
        )
    return None


def forbid_reduced_precision() -> None:
    """Sums inside a matrix product are made in FP32: torch's default allows 16 bits on CUDA."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def measure_mode(
    mode: PrecisionMode,
    device: torch.device,
    autocast: Any,
    policy: NumericsPolicy | None = None,
) -> dict[str, Any]:
    """Measures what matrix multiplications really give now, and refuses any difference.

    Args:
        autocast: context manager that the forward pass will run in; None where the engine computes
            in working copies of its own, which are looked at when they are there.
        policy: says how gradients are reduced and the loss is scaled.

    Raises:
        ConfigError: asked and measured differ; both are named.
    """
    policy = policy or NumericsPolicy()
    measured = {"float32_matmul": torch.get_float32_matmul_precision()}
    if autocast is not None:
        with autocast:
            product = torch.ones(16, 16, device=device) @ torch.ones(16, 16, device=device)
        measured["compute_dtype"] = str(product.dtype).removeprefix("torch.")
    for fact, found in measured.items():
        wanted = getattr(mode, fact)
        if found != wanted:
            raise ConfigError(
                f"{fact} measured as {found} after asking for {mode.name}",
                expected=wanted,
                where="precision",
                action="look for code or a variable that changes autocast or matmul precision",
            )
    matmul = torch.backends.cuda.matmul
    return {
        "mode": mode.name,
        **mode.to_dict(),
        **measured,
        "settings": _settings(mode, policy),
        "scaler": "static" if mode.scaler and policy.loss_scale is not None else mode.scaler,
        "allow_bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "allow_fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
    }


def _settings(mode: PrecisionMode, policy: NumericsPolicy) -> dict[str, Any]:
    """What of a policy changes the numbers of this mode; another launch is compared by it."""
    names = ["reduce_dtype", "keep_in_fp32"]
    if mode.name == "fp8":
        names += ["fp8_recipe", "fp8_skip"]
    if policy.pad_vocab_to_multiple_of is not None:
        names.append("pad_vocab_to_multiple_of")
    if mode.scaler is not None:
        names += [name for name in vars(policy) if "loss_scale" in name]
    values = {name: getattr(policy, name) for name in names}
    return {n: list(value) if isinstance(value, tuple) else value for n, value in values.items()}
