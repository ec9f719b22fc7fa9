# SPDX-License-Identifier: Apache-2.0
"""What the numbers of a step look like, every `numerics_steps`: the metrics of group `precision`.

Shares are of samples, up to 4096 elements of each parameter at equal distances, so that the cost
does not grow with the model. Nothing waits for the device before `result`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mprecipes.compute.culprits import GradientPart, clean_name, local_part
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.ranks import Ranks

SAMPLE = 4096
FP16_TINY, FP16_NORMAL = 2.0**-24, 2.0**-14  # smallest number, smallest with all its bits
BF16_TINY = 2.0**-133
_FP8_RANGES = {"tensorwise": (57344.0, 2.0**-16), "rowwise": (448.0, 2.0**-9)}  # e5m2, e4m3


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Gives up to 4096 elements, in FP32, as a copy."""
    flat = local_part(tensor).detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].float().clone()


@dataclass(frozen=True)
class ActivationFacts:
    """What a block's output, or an FP8 module's input, looked like; scalars on the device."""

    amax: torch.Tensor
    subnormal: torch.Tensor
    underflow: torch.Tensor


def activation_facts(values: torch.Tensor, *, whole: bool) -> ActivationFacts:
    """Gives the largest magnitude and the shares that FP16 holds as subnormal, or as zero.

    Args:
        whole: the maximum is over all elements, not over a sample.
    """
    sizes = sample(values).abs()
    given = sizes[sizes > 0]
    count = max(1, len(given))
    return ActivationFacts(
        amax=values.detach().abs().amax().float() if whole else sizes.amax(),
        subnormal=((given >= FP16_TINY / 2) & (given < FP16_NORMAL)).sum() / count,
        underflow=(given < FP16_TINY / 2).sum() / count,
    )


class StepMeasurement:
    """One step: gradients before clipping, and weights before and after the update.

    Args:
        parts: gives what this rank holds of the trained parameters, now and before the update.
        scale: loss scale that the gradients still carry.
        policy: says how FP8 is scaled.
        without: names whose zeros are no underflow, such as embeddings of tokens not seen.
        ranks: that hold the other parts, where the model is sharded.
    """

    def __init__(
        self,
        parts: Callable[[], list[GradientPart]],
        scale: float,
        policy: NumericsPolicy,
        without: Iterable[str],
        ranks: Ranks | None = None,
    ) -> None:
        self._parts, self.scale, without = parts, scale, set(without)
        self._ranks = ranks or Ranks()
        largest, smallest = _FP8_RANGES.get(policy.fp8_recipe, _FP8_RANGES["rowwise"])
        zeros16, zeros8, self._counted = [], [], 0
        for part in parts():
            if part.gradient is None or not part.is_matrix or part.name in without:
                continue
            sizes = sample(part.gradient).abs()
            if not len(sizes):  # this rank holds no row of it
                continue
            self._counted += len(sizes)
            zeros16.append((sizes < FP16_TINY).sum())
            zeros8.append((sizes < sizes.amax() * (smallest / 2 / largest)).sum())
        self._zeros = torch.stack([sum(zeros16), sum(zeros8)]) if zeros16 else None  # type: ignore[list-item]
        self._updated: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._graded: list[torch.Tensor] = []

    def before_update(self) -> None:
        """Copies weights, and which of them have a gradient; call it between clip and step."""
        for part in self._parts():
            if part.gradient is not None:
                self._updated.append(part.weight)
                self._before.append(sample(part.weight))
                self._graded.append(sample(part.gradient) != 0)

    def result(self) -> dict[str, float]:
        """Collective where the model is sharded: gives the shares, by metric name.

        Call it after the update. Waits for the device.
        """
        zeros = self._zeros.tolist() if self._zeros is not None else [0, 0]
        counts = [float(each) for each in (*zeros, self._counted)] + [0.0] * 5
        if self._before:
            after = torch.cat([sample(weight) for weight in self._updated])
            counts[3:] = vanishing_counts(torch.cat(self._before), after, torch.cat(self._graded))
        fp16, fp8, counted, *lost = self._ranks.sum(counts)
        values: dict[str, float] = {}
        if counted:
            values["precision/gradient_underflow_fp16"] = fp16 / counted
            values["precision/gradient_underflow_fp8"] = fp8 / counted
        return values | (vanishing(lost) if any(lost) else {})


def vanishing(counts: Sequence[float]) -> dict[str, float]:
    """Gives the shares of updates that are lost: without masters in 16 bit, and with them.

    Args:
        counts: of `vanishing_counts`, or their sums.
    """
    bf16, fp16, moved, masters, graded = counts
    return {
        "precision/vanishing_updates_bf16": bf16 / max(1.0, moved),
        "precision/vanishing_updates_fp16": fp16 / max(1.0, moved),
        "precision/vanishing_updates_masters": masters / max(1.0, graded),
    }


def vanishing_counts(
    before: torch.Tensor, after: torch.Tensor, graded: torch.Tensor
) -> list[float]:
    """Counts updates lost in BF16, in FP16, all; those lost by the masters, those with a gradient.

    An update below half the distance of the weight to its neighbour rounds back to the weight; of
    a weight of 0 that neighbour is the format's smallest subnormal.

    Args:
        before, after: weights in FP32.
        graded: which of them had a gradient.
    """
    update = (after - before).abs()
    moved = update > 0
    _, exponent = torch.frexp(before)  # before = m * 2^exponent, 0.5 <= m < 1
    exponent = exponent.masked_fill(before == 0, -125)  # of the smallest normal FP32 number
    half = torch.ones_like(before)
    bf16 = torch.ldexp(half, exponent - 9).clamp(min=BF16_TINY / 2)  # 8 significant bits
    fp16 = torch.ldexp(half, exponent - 12).clamp(min=FP16_TINY / 2)  # 11 significant bits
    lost = [moved & (update < bf16), moved & (update < fp16), moved, graded & ~moved, graded]
    return torch.stack([each.sum() for each in lost]).double().tolist()


def layer_norms(
    norms: Mapping[str, float], blocks: Iterable[str], scale: float
) -> dict[str, float]:
    """Gives the gradient norm of each block, and of each module outside them, by metric name.

    Args:
        norms: of each parameter, as they stand.
        scale: loss scale they still carry.
    """
    squares: dict[str, float] = {}
    known = list(blocks)
    for name, norm in norms.items():
        block = next((b for b in known if name.startswith(f"{b}.")), name.rpartition(".")[0])
        squares[block] = squares.get(block, 0.0) + (norm / scale) ** 2
    return {f"precision/layer_grad_norm/{name}": s**0.5 for name, s in squares.items()}


def embedding_parameters(model: torch.nn.Module) -> set[str]:
    """Gives the names of the embeddings' weights."""
    return {
        f"{clean_name(name)}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }


def closeness(gradient: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Gives relative error and cosine; 0 and 1 where both are all zeros, cosine 0 where one is."""
    left, right = gradient.double().flatten(), reference.double().flatten()
    error = (left - right).norm() / right.norm().clamp(min=1e-30)
    product = left.norm() * right.norm()
    cosine = left @ right / product if product else torch.equal(left, right)
    return float(error), float(cosine)
