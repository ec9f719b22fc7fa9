# SPDX-License-Identifier: Apache-2.0
"""What happens to a step whose numbers failed: left out, or the end of the run with a diagnosis.

FP16: an overflow leaves the update out and lowers the loss scale; `max_consecutive_skips` of them
in a row, or one at the floor, end the run. Other modes: by `on_numeric_failure`. Every decision is
made before the update, from numbers all ranks share.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from mprecipes.compute.culprits import BlockWatch, GradientNorms, name_culprits
from mprecipes.compute.fallback import Descent, fall_back
from mprecipes.compute.kept import KeptInFp32
from mprecipes.compute.measuring import (
    ActivationFacts,
    StepMeasurement,
    activation_facts,
    embedding_parameters,
    layer_norms,
)
from mprecipes.compute.partitions import gradient_parts
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.ranks import Ranks
from mprecipes.compute.reduction import GradientReduction
from mprecipes.compute.scaling import LossScaler, exact
from mprecipes.errors import NumericsError


class Gate(Protocol):
    """What is used of an Accelerator."""

    @property
    def sync_gradients(self) -> bool: ...


@dataclass(frozen=True)
class Judgement:
    """What becomes of one step.

    Attributes:
        skipped: the update is left out.
        loss_scale: of the next step; None without a scaler.
        notes: lines for people.
    """

    skipped: bool = False
    loss_scale: float | None = None
    notes: tuple[str, ...] = ()


@dataclass
class NumericsWatch:
    """Judges each step; made by `watch_numerics`, used by `StepMeter`."""

    ranks: Ranks
    descent: Descent
    device: torch.device
    scaler: LossScaler | None
    gate: Gate
    blocks: BlockWatch
    norms: GradientNorms
    kept: KeptInFp32
    reduction: GradientReduction
    embeddings: frozenset[str] = frozenset()
    consecutive_skips: int = 0
    _verified: bool = field(default=False, repr=False)
    _step: int | None = field(default=None, repr=False)
    _measured: StepMeasurement | None = field(default=None, repr=False)
    _activations: dict[tuple[str, bool], ActivationFacts] = field(default_factory=dict, repr=False)
    _values: dict[str, float] = field(default_factory=dict, repr=False)

    @property
    def mode(self) -> str:
        return self.descent.mode.name

    @property
    def policy(self) -> NumericsPolicy:
        return self.descent.policy

    def after_backward(self) -> None:
        """Call it after each backward; takes gradient norms once they are those of the step."""
        if not self.gate.sync_gradients:
            return
        self.norms.take()
        self._measured = None
        if self._is_due(self._step):
            scale = 1.0 if self.scaler is None else self.scaler.current
            self._measured = StepMeasurement(
                self.norms.parts, scale, self.policy, self.embeddings, self.norms.ranks
            )

    def measured(self) -> dict[str, float]:
        """Collective under sharding: gives the metrics of the step just made, {} if none are due.

        Call it after the optimizer; it waits for the device when it has something to give.
        """
        values, self._values = self._values, {}
        if self._measured is not None:
            values |= self._measured.result()
            self._measured = None
        for (name, is_fp8_input), facts in self._activations.items():
            if is_fp8_input:
                values[f"precision/fp8_amax/{name}"] = float(facts.amax)
                continue
            values[f"precision/subnormal_activations/{name}"] = float(facts.subnormal)
            values[f"precision/underflow_activations/{name}"] = float(facts.underflow)
            if self.policy.activation_maxima:
                values[f"precision/activation_amax/{name}"] = float(facts.amax)
        self._activations.clear()
        is_due = self._is_due(self._step)
        self.blocks.measure = self._note_activation if is_due else None
        return values

    def _is_due(self, done: int | None) -> bool:
        """Whether the step after `done` is measured; the first of a process only with 1."""
        every = self.policy.numerics_steps
        return every == 1 or (every is not None and done is not None and (done + 1) % every == 0)

    def _note_activation(self, name: str, values: torch.Tensor, is_fp8_input: bool) -> None:
        whole = is_fp8_input or self.policy.activation_maxima
        self._activations[name, is_fp8_input] = activation_facts(values, whole=whole)

    def found_inf(self) -> torch.Tensor | None:
        """Gives the scaler's verdict on this step's gradients, on the device; None without one."""
        return None if self.scaler is None else self.scaler.found_inf()

    def judge(
        self,
        step: int,
        *,
        loss: float,
        norm: float,
        found_inf: bool,
        refusal: Callable[[str], NumericsError | None],
    ) -> Judgement:
        """Collective where something is not finite: decides what becomes of the step.

        Args:
            loss, norm, found_inf: the same on every rank.
            refusal: collective; gives the error that names what was not finite, and the layer, or
                None where somebody else judges the step.

        Raises:
            NumericsError: the run cannot go on; on every rank, before the update.
            FellBack: likewise, and the next launch goes one rung down.
        """
        self._step = step
        if not self._verified:
            self._verified = True
            self.kept.verify()
            self.reduction.verify()
        if math.isfinite(loss) and math.isfinite(norm) and not found_inf:
            self.consecutive_skips = 0
            self.blocks.clear()
            if self._measured is not None:
                self._measured.before_update()
                by_name = self.norms.by_name()
                self._values = layer_norms(by_name, self.blocks.names, self._measured.scale)
                self._values["precision/nonfinite_gradients"] = 0
            return self._clean(step)
        place, modules = name_culprits(self.ranks, self.blocks, self.norms)
        self.blocks.clear()
        self.consecutive_skips += 1
        self._measured = None
        everywhere = set().union(*self.norms.ranks.gather(self.norms.bad()))
        self._values = {"precision/nonfinite_gradients": len(everywhere)}
        if self.scaler is not None:
            return self._overflow(step, place, modules)
        if self.policy.on_numeric_failure != "skip":
            error = refusal(f"{place}, in precision {self.mode}")
            if error is None:
                return Judgement()
            raise self._failed(error, modules, step)
        if self.consecutive_skips >= self.policy.max_consecutive_skips:
            raise self._failed(self._endless(step, place), modules, step)
        line = f"step {step} skipped: loss {loss:g}, gradient norm {norm:g} (first in {place})"
        return Judgement(True, None, (line,))

    def _clean(self, step: int) -> Judgement:
        if self.scaler is None:
            return Judgement()
        change = self.scaler.settle(overflowed=False)
        grown = () if change.before == change.after else (f"loss scale {change} after step {step}",)
        return Judgement(False, change.after, grown)

    def _overflow(self, step: int, place: str, modules: list[str]) -> Judgement:
        assert self.scaler is not None
        was_at_floor = self.scaler.is_at_floor
        change = self.scaler.settle(overflowed=True)
        self.consecutive_skips = self.scaler.consecutive_skips
        if was_at_floor or self.consecutive_skips >= self.policy.max_consecutive_skips:
            error = self._endless(step, place, modules, change.before)
            raise self._failed(error, modules, step)
        what = "skipping step" if self.scaler.is_static else "skipping step, reducing scale"
        line = f"loss scale {change}, step {step} skipped (overflow in {place}): {what}"
        return Judgement(True, change.after, (line,))

    def _failed(self, error: NumericsError, modules: list[str], step: int) -> Exception:
        return fall_back(error, self.descent, modules, self.device, step)

    def _endless(
        self, step: int, place: str, modules: list[str] | None = None, scale: float | None = None
    ) -> NumericsError:
        """The diagnosis that ends a run whose every step is left out."""
        count = self.consecutive_skips
        at = "" if scale is None else f" at loss scale {exact(scale)}"
        if self.scaler is not None and scale is not None and scale <= self.policy.loss_scale_floor:
            at += ", its floor"
        also = f" (then {', '.join(modules[1:4])})" if modules and len(modules) > 1 else ""
        return NumericsError(
            f"{count} steps in a row were skipped; the last overflowed{at}, first in {place}{also}",
            expected=f"an update that is finite within {self.policy.max_consecutive_skips} steps, "
            "at a loss scale above its floor; no update was applied since",
            where=f"step {step}, precision {self.mode}",
            action="try --precision bf16, whose range needs no loss scale, or hold that module in "
            'FP32 with --numerics \'{"keep_in_fp32": ["..."]}\'; see on_numeric_failure: fallback',
        )


def watch_numerics(launch: Any, model: torch.nn.Module) -> NumericsWatch:
    """Gives the watch of a launch over a model that `Accelerator.prepare` gave.

    Args:
        launch: of `start`.
    """
    held = partial(gradient_parts, model) if launch.engine.zero_stage else None
    return NumericsWatch(
        ranks=launch.ranks,
        descent=launch.descent,
        device=launch.device,
        scaler=launch.scaler,
        gate=launch.accelerator,
        blocks=BlockWatch(model),
        norms=GradientNorms(model, launch.ranks, held),
        kept=launch.kept,
        reduction=GradientReduction(model, launch.policy.reduce_dtype),
        embeddings=frozenset(embedding_parameters(model)),
    )
