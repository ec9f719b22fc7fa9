# SPDX-License-Identifier: Apache-2.0
"""`mprecipes env --modes`: what each precision mode is, and what of it this machine really does.

Dtypes are measured: in each mode that runs here one step of a small network is made, and weight,
gradient, accumulated gradient and optimizer moment are looked at.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from mprecipes.compute.float8 import convert_to_float8
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.precision import MODES, PrecisionMode, why_not


@dataclass(frozen=True)
class ModeRow:
    """One mode on this machine.

    Attributes:
        runs: "yes", "no" or, with a slower way in place of hardware, "slowly".
        why: why not, or what stands in for hardware; empty where it simply runs.
        product, weight, gradient, accumulation, moment: measured dtypes; the table's where it does
            not run here.
        reduce: the default of `reduce_dtype`, which every launch measures.
        measured: whether the dtypes were.
    """

    mode: str
    runs: str
    why: str
    product: str
    weight: str
    gradient: str
    accumulation: str
    reduce: str
    moment: str
    exponent_bits: int
    mantissa_bits: int
    scaler: str | None
    limitation: str
    measured: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_modes(device: torch.device | None = None) -> list[ModeRow]:
    """Gives a row for each mode.

    Args:
        device: None for the GPU where there is one, else the CPU.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [_row(mode, device) for mode in MODES.values()]


def _row(mode: PrecisionMode, device: torch.device) -> ModeRow:
    refusal, note = why_not(mode, device)
    dtypes = {
        "product": mode.compute_dtype,
        "weight": mode.master_dtype,
        "gradient": mode.gradient_dtype,
        "accumulation": mode.accumulate_dtype,
        "moment": mode.moment_dtype,
    }
    if refusal is None:
        dtypes = measure_step(mode, device)
    return ModeRow(
        mode=mode.name,
        runs="no" if refusal else "slowly" if note else "yes",
        why=f"{refusal}; it needs {mode.needs}" if refusal else note or "",
        reduce=mode.reduce_dtype,
        exponent_bits=mode.exponent_bits,
        mantissa_bits=mode.mantissa_bits,
        scaler=mode.scaler,
        limitation=mode.limitation,
        measured=refusal is None,
        **dtypes,
    )


def measure_step(mode: PrecisionMode, device: torch.device) -> dict[str, str]:
    """Gives the dtypes of one step of two micro-batches through two Linear of 16 x 16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(mode.float32_matmul)
    try:
        layers = [torch.nn.Linear(16, 16, device=device) for _ in range(2)]
        model: torch.nn.Module = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        if mode.name == "fp8":
            convert_to_float8(model, NumericsPolicy(), device)
        enabled = mode.autocast != "no"
        dtype = getattr(torch, mode.compute_dtype) if enabled else None
        weight = next(model.parameters())
        kinds: list[torch.dtype] = []
        for _ in range(2):
            with torch.autocast(device.type, dtype=dtype, enabled=enabled):
                product = model(torch.ones(16, 16, device=device))
            product.float().sum().backward()
            assert weight.grad is not None
            kinds.append(weight.grad.dtype)
        optimizer.step()
        moment = optimizer.state[weight]["exp_avg"].dtype
    finally:
        torch.set_float32_matmul_precision(before)
    found = {
        "product": product.dtype, "weight": weight.dtype, "gradient": kinds[0],
        "accumulation": kinds[1], "moment": moment,
    }  # fmt: skip
    return {name: str(kind).removeprefix("torch.") for name, kind in found.items()}
