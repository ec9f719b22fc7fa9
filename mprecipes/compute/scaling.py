# SPDX-License-Identifier: Apache-2.0
"""The loss scale of FP16: grows, falls, is saved and restored, and never falls for ever.

FP16 holds nothing below 2^-24: gradients are multiplied by a scale before backward and divided by
it before clipping. Where they then overflow, the update is left out and the scale falls. `settle`
decides both, once a step, before the update; the recipe calls the optimizer or does not.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from mprecipes.compute.policy import NumericsPolicy


def exact(scale: float) -> str:
    """Gives a loss scale as people write it: 65536, 0.5."""
    return str(int(scale)) if scale.is_integer() else repr(scale)


@dataclass(frozen=True)
class ScaleChange:
    """The loss scale a step was made with, and the one the next step has."""

    before: float
    after: float

    def __str__(self) -> str:
        before, after = exact(self.before), exact(self.after)
        return before if before == after else f"{before} -> {after}"


class LossScaler(torch.amp.GradScaler):
    """A GradScaler with floor, hysteresis and a static scale, on CPU and GPU.

    `Accelerator` and fused optimizers know it as torch's own. `unscale_` notes overflows as torch
    does; the scale changes in `settle` alone, and `update`, which accelerate calls after the
    optimizer, only makes ready for the next step.

    Source of the rule with hysteresis: Megatron-LM, megatron/core/optimizer/grad_scaler.py.
    """

    def __init__(self, device: str, policy: NumericsPolicy) -> None:
        self.is_static = policy.loss_scale is not None
        initial = policy.loss_scale if policy.loss_scale is not None else policy.initial_loss_scale
        super().__init__(
            device,
            init_scale=initial,
            growth_factor=policy.loss_scale_growth_factor,
            backoff_factor=policy.loss_scale_backoff_factor,
            growth_interval=policy.loss_scale_growth_interval,
        )
        self._floor, self._hysteresis = policy.loss_scale_floor, policy.loss_scale_hysteresis
        self._current, self._clean_steps = float(initial), 0
        self._overflows_left = self._hysteresis
        self.consecutive_skips = 0
        self._noted: torch.Tensor | None = None

    @property
    def current(self) -> float:
        """The scale of the next backward; asks no device."""
        return self._current

    @property
    def is_at_floor(self) -> bool:
        return self._current <= self._floor and not self.is_static

    def note(self, overflowed: bool) -> None:
        """Notes what an engine found that divides by the scale in its own update."""
        self._noted = torch.tensor(float(overflowed), device=self._device)

    def found_inf(self) -> torch.Tensor:
        """Gives what was noted: a scalar on the device, above zero after an overflow."""
        if self._noted is not None:
            return self._noted
        noted = [
            found
            for state in self._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        ]
        assert noted, "clip_grad_norm_ comes before the step is judged: it unscales"
        return torch.stack([found.to(noted[0].device) for found in noted]).sum()

    def settle(self, *, overflowed: bool) -> ScaleChange:
        """Decides the next scale from what all ranks found in this step's unscaled gradients.

        Args:
            overflowed: the same on every rank; the update is left out.
        """
        before = self._current
        if overflowed:
            self.consecutive_skips += 1
            self._clean_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0 and not self.is_static:
                self._set(max(self._floor, before * self.get_backoff_factor()))
            self.update()
            return ScaleChange(before, self._current)
        self.consecutive_skips = 0
        self._clean_steps += 1
        if self._clean_steps == self.get_growth_interval():
            self._clean_steps, self._overflows_left = 0, self._hysteresis
            if not self.is_static:
                self._set(before * self.get_growth_factor())
        return ScaleChange(before, self._current)

    def update(self, new_scale: Any = None) -> None:
        """Makes ready for the next `unscale_`; the scale itself is `settle`'s."""
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._noted = None

    def _get_growth_tracker(self) -> int:
        return self._clean_steps

    def get_scale(self) -> float:
        return self._current

    def state_dict(self) -> dict[str, Any]:
        """Gives scale and counters as JSON values; `scale` and `_growth_tracker` as torch's."""
        own = {
            "overflows_left": self._overflows_left,
            "consecutive_skips": self.consecutive_skips,
        }
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the counters, and the scale unless this launch has a static one.

        A step that was begun is forgotten: a rollback restores between clip and step.
        """
        self.update()
        self._clean_steps = int(state_dict["_growth_tracker"])
        self._overflows_left = int(state_dict.get("overflows_left", self._hysteresis))
        self.consecutive_skips = int(state_dict.get("consecutive_skips", 0))
        if not self.is_static:
            self._set(float(state_dict["scale"]))

    def _set(self, value: float) -> None:
        self._current = self._init_scale = value
        if self._scale is not None:
            self._scale.fill_(value)
