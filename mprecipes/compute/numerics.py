# SPDX-License-Identifier: Apache-2.0
"""What is watched in every optimizer step: loss, gradient norm, and the data they came from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from mprecipes.compute.mix import mix64
from mprecipes.compute.operators import NARROW
from mprecipes.compute.ranks import Ranks
from mprecipes.compute.traffic import Traffic
from mprecipes.compute.watching import Judgement, NumericsWatch
from mprecipes.errors import ConfigError, NumericsError

IGNORED = -100  # label of a position that is not a target, torch's own default


def batch_digest(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Gives a 64-bit digest of the sequences handed to the model: an int64 scalar on their device.

    The sum modulo 2^64 of one hash per sequence over its token ids, their positions and which of
    them are targets: it does not depend on how sequences are split over micro-batches and ranks.

    Args:
        tensors: `input_ids` and `labels`, both (batch, seq) int64; likewise `position_ids` and
            `segment_ids` where sequences are made of segments: these are then covered, and padding
            is not.
    """
    ids, is_target = tensors["input_ids"], tensors["labels"] != IGNORED
    positions = torch.arange(ids.shape[-1], device=ids.device)
    positions = tensors.get("position_ids", positions) << 33
    elements = mix64(ids.long() * 2 + is_target + positions)
    if (segments := tensors.get("segment_ids")) is not None:  # padding is not part of a sequence
        elements = mix64(elements + segments) * (segments >= 0)
    return mix64(elements.sum(dim=-1)).sum()


@dataclass(frozen=True)
class StepFacts:
    """One optimizer step as all ranks saw it.

    Attributes:
        loss: mean over the valid targets of the global batch, nats.
        grad_norm: L2 norm of the whole gradient before clipping.
        batch_digest: 16 hex digits, equal on any number of processes.
        stop: some rank was asked to stop.
        save: some rank wants a checkpoint of this step, or wanted one of a step that was skipped.
        loss_scale: of the next step; None without a loss scaler.
        skipped: numbers were not finite, and the update must be left out.
        notes: lines for people on what became of the step.
    """

    loss: float
    grad_norm: float
    batch_digest: str
    stop: bool
    save: bool
    loss_scale: float | None = None
    skipped: bool = False
    notes: tuple[str, ...] = ()


class StepMeter:
    """Gathers the micro-batches of an optimizer step and reduces them with one small collective.

    Args:
        watch: judges steps whose numbers are not finite; without one they are refused.
        refuse: a loss or gradient norm that is not finite is an error, or by the watch a step that
            is left out; else it is a fact like others, for a recipe that asks a `Guard` before the
            update. An overflow under a loss scale is always the watch's.

    Attributes:
        traffic: bytes that a step communicates, measured once.
    """

    def __init__(
        self, ranks: Ranks, watch: NumericsWatch | None = None, *, refuse: bool = True
    ) -> None:
        self._ranks, self._watch, self._refuses = ranks, watch, refuse
        self._owes_save, self.traffic = False, Traffic(ranks.world_size)
        self._losses: list[torch.Tensor] = []
        self._digests: list[torch.Tensor] = []
        self._samples: list[tuple[int, int]] = []

    def add(
        self, first_sample: int, tensors: Mapping[str, torch.Tensor], loss_sum: torch.Tensor
    ) -> None:
        """Notes one micro-batch; call it after its backward.

        Args:
            first_sample: number of its first sample in the run's order.
            tensors: what the model was given.
            loss_sum: FP32 scalar, summed over the micro-batch's valid targets.

        Raises:
            ConfigError: the loss was summed in 16 bit, which counts no further than 256 in BF16.
        """
        if loss_sum.dtype in NARROW:
            raise ConfigError(
                f"a loss in {str(loss_sum.dtype).removeprefix('torch.')}",
                expected="float32, in every precision mode",
                where="compute_loss",
                action="give the cross entropy `logits.float()`, and sum what it gives",
            )
        self._losses.append(loss_sum.detach())
        self._digests.append(batch_digest(tensors))
        self._samples.append((first_sample, first_sample + len(tensors["input_ids"]) - 1))
        if self._watch is not None:
            self._watch.after_backward()

    def reduce(
        self,
        step: int,
        *,
        num_targets: int,
        grad_norm: torch.Tensor | float,
        stop: bool,
        save: bool = False,
    ) -> StepFacts:
        """Collective: gives the facts of the step, and forgets its micro-batches.

        Args:
            step: number of this optimizer step, for the message.
            num_targets: valid targets of the global batch.
            grad_norm: scalar, equal on every rank; what any engine's `clip_grad_norm_` gave.
            stop: this rank was asked to stop.
            save: this rank wants a checkpoint of this step.

        Raises:
            NumericsError: on every rank, before the update, when the loss of any micro-batch or
                the gradient norm is not finite and the watch does not leave the update out; it
                names step, rank, samples and layer.
        """
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        device = self._losses[0].device
        found_inf = self._watch.found_inf() if self._watch is not None else None
        if found_inf is None:
            found_inf = torch.zeros((), device=device)
        norms = torch.as_tensor(grad_norm, device=device).detach().float()
        losses = torch.stack([*self._losses, norms, found_inf]).double().tolist()
        overflow, norm = losses.pop(), losses.pop()
        digest = int(torch.stack(self._digests).sum().item()) % (1 << 64)
        samples, self._losses, self._digests, self._samples = self._samples, [], [], []
        # 16-bit limbs: a float64 sum over ranks stays exact, which 64 bits at once would not.
        limbs = [float(digest >> shift & 0xFFFF) for shift in (0, 16, 32, 48)]
        mine = [math.fsum(losses), float(stop), float(save), overflow, *limbs]
        total, stops, saves, overflows, *limbs = self._ranks.sum(mine)
        self.traffic.step_ended()

        def refusal(place: str | None = None) -> NumericsError | None:
            return self._refusal(step, losses, norm, samples, place) if self._refuses else None

        judged = Judgement()
        if self._watch is not None:
            judged = self._watch.judge(
                step, loss=total, norm=norm, found_inf=overflows > 0, refusal=refusal
            )
        elif not (math.isfinite(total) and math.isfinite(norm)) and (error := refusal()):
            raise error
        digest = sum(int(limb) << shift for limb, shift in zip(limbs, (0, 16, 32, 48), strict=True))
        text = f"{digest % (1 << 64):016x}"
        wanted = saves > 0 or self._owes_save
        self._owes_save = wanted and judged.skipped  # what a skip left as it was is not saved again
        return StepFacts(
            loss=total / num_targets,
            grad_norm=norm,
            batch_digest=text,
            stop=stops > 0,
            save=wanted and not judged.skipped,
            loss_scale=judged.loss_scale,
            skipped=judged.skipped,
            notes=judged.notes,
        )

    def _refusal(
        self,
        step: int,
        losses: list[float],
        norm: float,
        samples: list[tuple[int, int]],
        place: str | None,
    ) -> NumericsError:
        """Collective: gives the same error on every rank, naming what was not finite where.

        A loss that is not finite makes every rank's gradient so: then losses alone are named.
        """
        mine = [
            f"loss {loss} on rank {self._ranks.rank}, samples {first}-{last}"
            for loss, (first, last) in zip(losses, samples, strict=True)
            if not math.isfinite(loss)
        ]
        spans = f"{min(first for first, _ in samples)}-{max(last for _, last in samples)}"
        whole = f"gradient norm {norm} on rank {self._ranks.rank}, samples {spans}"
        by_rank = self._ranks.gather((mine, whole))
        found = [line for lines, _ in by_rank for line in lines] or [line for _, line in by_rank]
        first = f"; first in {place}" if place else ""
        return NumericsError(
            "; ".join(found) + first,
            expected="a finite loss and gradient norm; the update was not applied",
            where=f"step {step}",
            action="launch again: the run continues before this step; look at these samples, lower "
            "--learning_rate or --max_grad_norm with --accept, or try --precision fp32"
            + ("; `mprecipes probe` finds which modules need BF16" if "fp8" in first else ""),
        )
