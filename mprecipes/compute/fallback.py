# SPDX-License-Identifier: Apache-2.0
"""The way down when numbers fail: one rung at a time, each on record, none unless asked for.

With `on_numeric_failure: fallback` a failure ends the process with exit code 75 and the rung that
the next launch must take in `run.json` (`fallback` of the attempt). That launch reads the rungs of
all attempts, takes them, goes on from the newest checkpoint, and has them in every manifest.

The rungs: hold the offending module in FP32; FP8 or FP16 to BF16; a lower learning rate; FP32.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.precision import MODES, PrecisionMode, why_not
from mprecipes.errors import FellBack, NumericsError
from mprecipes.identity.history import read_run_file


@dataclasses.dataclass(frozen=True)
class Descent:
    """Where a launch stands on the way down.

    Attributes:
        rungs: taken so far, oldest first, as JSON values.
    """

    mode: PrecisionMode
    policy: NumericsPolicy
    learning_rate_factor: float = 1.0
    rungs: tuple[dict[str, Any], ...] = ()

    @property
    def accepted(self) -> tuple[str, ...]:
        """What the rungs change, and a resume must accept."""
        return ("changed_precision", "changed_fallback") if self.rungs else ()

    def words(self) -> list[str]:
        """Gives each rung in a few words."""
        return [describe(rung) for rung in self.rungs]

    def story(self) -> list[str]:
        """Gives the rungs in words."""
        return [f"fallback since step {rung['step']}: {describe(rung)}" for rung in self.rungs]


def read_descent(output_dir: str, mode: PrecisionMode, policy: NumericsPolicy) -> Descent:
    """Gives mode, policy and learning-rate factor after the rungs earlier attempts recorded."""
    if policy.on_numeric_failure != "fallback":
        return Descent(mode, policy)
    facts = read_run_file(Path(output_dir)) or {"attempts": []}
    rungs = [entry["fallback"] for entry in facts["attempts"] if entry.get("fallback")]
    kept, factor = list(policy.keep_in_fp32), 1.0
    for rung in rungs:
        if rung["rung"] == "keep_in_fp32":
            kept += rung["modules"]
        elif rung["rung"] == "precision":
            mode = MODES[rung["mode"]]
        else:
            factor *= rung["factor"]
    policy = dataclasses.replace(policy, keep_in_fp32=tuple(dict.fromkeys(kept)))
    return Descent(mode, policy, factor, tuple(rungs))


def next_rung(
    descent: Descent, modules: Sequence[str], device: torch.device
) -> dict[str, Any] | None:
    """Gives the rung below, as JSON values; None at the bottom.

    Args:
        modules: that failed first, most likely first; empty where none was seen.
    """
    taken = [rung["rung"] for rung in descent.rungs]
    mode, policy = descent.mode, descent.policy
    if modules and "keep_in_fp32" not in taken and mode.compute_dtype != "float32":
        return {"rung": "keep_in_fp32", "modules": [modules[0]]}
    if mode.name in ("fp8", "fp16") and why_not(MODES["bf16"], device)[0] is None:
        return {"rung": "precision", "mode": "bf16"}
    if "learning_rate" not in taken:
        return {"rung": "learning_rate", "factor": policy.learning_rate_factor}
    if mode.name != "fp32":
        return {"rung": "precision", "mode": "fp32"}
    return None


def fall_back(
    error: NumericsError, descent: Descent, modules: Sequence[str], device: torch.device, step: int
) -> NumericsError | FellBack:
    """Gives what to raise in place of a failure: the same where no fallback is left or wanted."""
    if descent.policy.on_numeric_failure != "fallback":
        return error
    rung = next_rung(descent, modules, device)
    if rung is None:
        return NumericsError(
            f"{error.found}; every rung of the fallback was taken",
            expected=error.expected,
            where=error.where,
            action="look at the data of this step and at the model: no precision helped",
        )
    rung |= {"step": step, "reason": error.found[:400]}
    return FellBack(
        error.found,
        expected=error.expected,
        where=error.where,
        action=f"launch the same command again: it goes on from the newest checkpoint with "
        f"{describe(rung)}",
    ).with_rung(rung)


def describe(rung: dict[str, Any]) -> str:
    """Gives a rung in words."""
    if rung["rung"] == "keep_in_fp32":
        return f"{', '.join(rung['modules'])} held in FP32"
    if rung["rung"] == "precision":
        return f"precision {rung['mode']}"
    return f"the learning rate times {rung['factor']:g}"
