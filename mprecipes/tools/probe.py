# SPDX-License-Identifier: Apache-2.0
"""`mprecipes probe`: does a recipe train as well in each mode as in FP32, shown on a few steps.

FP32 trains a few dozen steps. Each other mode then computes gradients at the same weights on the
same batches (before the first step, half way and at the end), and trains the same steps from the
same weights. A mode that differs too much is tried again, see `probe_causes`.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mprecipes.compute.conversion import check_masters
from mprecipes.compute.culprits import clean_name, parameter_parts
from mprecipes.compute.float8 import MULTIPLE, convert_to_float8
from mprecipes.compute.kept import keep_in_fp32
from mprecipes.compute.measuring import StepMeasurement, closeness, embedding_parameters
from mprecipes.compute.operators import HeldOperators
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.precision import MODES, PrecisionMode, forbid_reduced_precision, why_not
from mprecipes.compute.randomness import seed_everything, seed_micro_batch
from mprecipes.compute.ranks import Ranks, plan_batches
from mprecipes.compute.scaling import LossScaler
from mprecipes.compute.vocabulary import pad_vocabulary
from mprecipes.data.order import SampleOrder, micro_batches
from mprecipes.identity.recipe import read_recipe
from mprecipes.tools.probe_causes import find_cause, round_as_reduced

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Limits:
    """How far a mode may be from FP32.

    Attributes:
        cosine: of the worst layer's gradient, at least.
        loss: relative gap of the mean loss of the last quarter of the steps, at most.
    """

    cosine: float
    loss: float


LIMITS = {
    "tf32": Limits(0.9999, 0.002),
    "bf16": Limits(0.99, 0.005),
    "fp16": Limits(0.999, 0.005),
    "fp8": Limits(0.95, 0.01),
}


@dataclass
class ModeFindings:
    """What one mode did beside FP32; `layers`: name -> worst [relative error, cosine] seen."""

    mode: str
    passed: bool = False
    reason: str = ""
    cause: str | None = None
    losses: list[float] = field(default_factory=list)
    layers: dict[str, list[float]] = field(default_factory=dict)
    loss_gap: float = 0.0
    skipped_steps: int = 0
    gradient_underflow: float = 0.0
    tokens_per_second: float = 0.0
    memory_bytes: int | None = None

    @property
    def worst(self) -> tuple[str, float, float]:
        """The layer with the lowest cosine: (name, relative error, cosine)."""
        name = min(self.layers, key=lambda layer: self.layers[layer][1], default="")
        error, cosine = self.layers.get(name, [0.0, 1.0])
        return name, error, cosine

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "worst": list(self.worst)}


def load_recipe(path: Path) -> ModuleType:
    """Gives the module of a recipe's file, `RECIPE`, `Config`, `build_model` and all.

    Raises:
        ConfigError: no such file, or it is no recipe.
    """
    read_recipe(path)
    loader = SourceFileLoader("probed_recipe", str(path))  # whatever the file's ending
    spec = importlib.util.spec_from_loader("probed_recipe", loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["probed_recipe"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class OneStep:
    """Call it for a forward and backward of its model."""

    model: torch.nn.Module
    run: Callable[[], object]

    def __call__(self) -> None:
        self.run()


class Prober:
    """One recipe, one config, the same weights and batches for every mode.

    Args:
        data: rows to train on; a map-style data set.
        steps: trained in each mode.
    """

    def __init__(
        self, recipe: ModuleType, config: Any, data: Any, *, steps: int, device: torch.device
    ) -> None:
        self._recipe, self._config, self.steps, self.device = recipe, config, steps, device
        self.operators = HeldOperators(device, torch.bfloat16)  # as a launch; FP16 has the same
        plan = plan_batches(
            Ranks(), micro_batch=config.per_device_train_batch_size, accumulation=1,
            global_batch=None,
        )  # fmt: skip
        source = micro_batches(data, SampleOrder(len(data), config.seed), plan, start=0)
        self._batches = [next(source).to(device) for _ in range(steps)]
        labels = [batch.tensors["labels"][:, 1:] for batch in self._batches]
        self._num_targets = [(each != -100).sum() for each in labels]
        self._points = sorted({0, steps // 2, steps - 1})
        self._weights: dict[int, Weights] = {}
        self._gradients: dict[int, Weights] = {}
        self._reference: ModeFindings | None = None

    def reference(self) -> ModeFindings:
        """Trains in FP32 and keeps weights and gradients of the points to compare at."""
        self._reference = self._train(MODES["fp32"], NumericsPolicy(), keep=True)
        self._reference.passed, self._reference.reason = True, "the reference"
        return self._reference

    def probe(self, mode: PrecisionMode, policy: NumericsPolicy) -> ModeFindings:
        """Gives findings and verdict of a mode, and the cause where the verdict is bad."""
        refusal, _ = why_not(mode, self.device)
        if refusal is not None:
            return ModeFindings(mode.name, reason=f"not run: {refusal}")
        found = self._train(mode, policy)
        found.layers = self._compare(mode, policy)
        found.passed, found.reason = self._judge(found)
        if not found.passed:
            found.cause = self._cause(mode, policy, found)
        return found

    def one_step(self, mode: PrecisionMode, policy: NumericsPolicy) -> "OneStep":
        """Gives a forward and backward of the first batch, and the model they are of."""
        model = self._converted(mode, policy)
        return OneStep(model, lambda: self._gradient(mode, policy, model, 0))

    def _judge(self, found: ModeFindings) -> tuple[bool, str]:
        assert self._reference is not None
        tail = max(1, self.steps // 4)
        ours, theirs = (sum(f.losses[-tail:]) / tail for f in (found, self._reference))
        found.loss_gap = ours / theirs - 1
        limits, (name, error, cosine) = LIMITS[found.mode], found.worst
        if found.loss_gap != found.loss_gap or found.loss_gap > limits.loss:
            return False, f"loss {100 * found.loss_gap:+.2f} %, at most {100 * limits.loss:g} %"
        if not cosine >= limits.cosine:
            return False, f"gradient of {name}: cosine {cosine:.4f}, at least {limits.cosine:g}"
        return True, (
            f"loss {100 * found.loss_gap:+.2f} %, worst gradient {name}: cosine {cosine:.4f}, "
            f"relative error {error:.3f}"
        )

    def _cause(self, mode: PrecisionMode, policy: NumericsPolicy, bad: ModeFindings) -> str:
        def compare(changed: NumericsPolicy, context: AbstractContextManager[Any]) -> float:
            with context:
                layers = self._compare(mode, changed)
            return min((pair[1] for pair in layers.values()), default=0.0)

        names = [name for name, _ in self._model().named_modules()]
        return find_cause(compare, names, mode, policy, bad.worst[2])

    def _model(self) -> torch.nn.Module:
        seed_everything(self._config.seed)
        return self._recipe.build_model(self._config).to(self.device)

    def _converted(self, mode: PrecisionMode, policy: NumericsPolicy) -> torch.nn.Module:
        model = self._model()
        if mode.name == "fp8":
            convert_to_float8(model, policy, self.device)
        if policy.pad_vocab_to_multiple_of is not None:
            pad_vocabulary(model, policy.pad_vocab_to_multiple_of)
        keep_in_fp32(model, policy.keep_in_fp32, self.device)
        check_masters(model)
        return model.train()

    def _forward(self, mode: PrecisionMode, model: torch.nn.Module, number: int) -> torch.Tensor:
        """The mean loss per target of one batch."""
        batch = self._batches[number]
        seed_micro_batch(self._config.seed, batch.first_sample)
        enabled = mode.autocast != "no"
        dtype = getattr(torch, mode.compute_dtype) if enabled else None
        torch.set_float32_matmul_precision(mode.float32_matmul)
        with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
            loss_sum = self._recipe.compute_loss(model, batch.tensors)
        return loss_sum / self._num_targets[number]

    def _gradient(
        self, mode: PrecisionMode, policy: NumericsPolicy, model: torch.nn.Module, number: int
    ) -> Weights:
        fixed = policy.loss_scale or policy.initial_loss_scale
        scale = fixed if mode.scaler is not None else 1.0
        model.zero_grad()
        (self._forward(mode, model, number) * scale).backward()
        named = ((clean_name(n), p.grad) for n, p in model.named_parameters())
        return {n: round_as_reduced(g.detach(), policy) / scale for n, g in named if g is not None}

    def _compare(self, mode: PrecisionMode, policy: NumericsPolicy) -> dict[str, list[float]]:
        model = self._converted(mode, policy)
        layers: dict[str, list[float]] = {}
        for point in self._points:
            model.load_state_dict(self._weights[point])
            for name, grad in self._gradient(mode, policy, model, point).items():
                error, cosine = closeness(grad, self._gradients[point][name])
                old = layers.get(name, [0.0, 1.0])
                layers[name] = [max(old[0], error), min(old[1], cosine)]
        return layers

    def _train(
        self, mode: PrecisionMode, policy: NumericsPolicy, *, keep: bool = False
    ) -> ModeFindings:
        model, found = self._converted(mode, policy), ModeFindings(mode.name)
        optimizer = self._recipe.build_optimizer(model, self._config)
        scaler = LossScaler(self.device.type, policy) if mode.scaler is not None else None
        named = {clean_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds, updates = 0.0, 0
        for number in range(self.steps):
            if keep and number in self._points:
                self._weights[number] = {n: t.clone() for n, t in model.state_dict().items()}
                self._gradients[number] = self._gradient(mode, policy, model, number)
                model.zero_grad()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # takes no time of the step
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = self._recipe.learning_rate(self._config, updates)
            loss = self._forward(mode, model, number)
            (loss if scaler is None else scaler.scale(loss)).backward()
            for parameter in named.values():
                if parameter.grad is not None:
                    parameter.grad = round_as_reduced(parameter.grad, policy)
            if number == self._points[1 % len(self._points)]:
                scale = 1.0 if scaler is None else scaler.current
                measured = StepMeasurement(
                    partial(parameter_parts, named), scale, policy, embedding_parameters(model)
                )
                kind = "fp8" if mode.name == "fp8" else "fp16"
                shares = measured.result()
                found.gradient_underflow = shares[f"precision/gradient_underflow_{kind}"]
            if scaler is not None:
                scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(
                model.parameters(), self._config.max_grad_norm or float("inf")
            )
            fine = bool(norm.isfinite()) and bool(loss.isfinite())
            if scaler is not None:
                scaler.settle(overflowed=not fine)
            if fine:
                optimizer.step()
                if scaler is not None:
                    scaler.update()
            updates += fine
            found.skipped_steps += not fine
            optimizer.zero_grad()
            found.losses.append(loss.item())  # waits for the device
            seconds += time.perf_counter() - began
        found.tokens_per_second = int(sum(self._num_targets)) / seconds
        if self.device.type == "cuda":
            found.memory_bytes = torch.cuda.max_memory_allocated(self.device)
        return found


def size_warnings(model_config: Any) -> list[str]:
    """Gives a line for each size that misses a multiple of 8 (FP16, BF16) or 16 (FP8).

    Args:
        model_config: of transformers; a GPT-2's `n_embd` is its hidden size too.
    """
    sizes = {
        name: getattr(model_config, name, None)
        for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    }
    heads = getattr(model_config, "num_attention_heads", None)
    if sizes["head_dim"] is None and heads and sizes["hidden_size"]:
        sizes["head_dim"] = sizes["hidden_size"] // heads
    lines = []
    for name, size in sizes.items():
        if isinstance(size, int) and size % MULTIPLE:
            slow = "no multiple of 8: slow in 16 bit, " if size % 8 else ""
            way = "; numerics: {pad_vocab_to_multiple_of: 16} pads" if name == "vocab_size" else ""
            lines.append(f"{name} {size}: {slow}no multiple of {MULTIPLE}: not for FP8{way}")
    return lines


def probe_recipe(
    recipe: ModuleType, config: Any, data: Any, modes: Sequence[str], *, steps: int,
    policy: NumericsPolicy, device: torch.device,
) -> list[ModeFindings]:  # fmt: skip
    """Gives findings of FP32 and of each mode, in this order."""
    before = torch.get_float32_matmul_precision()
    forbid_reduced_precision()
    try:
        prober = Prober(recipe, config, data, steps=steps, device=device)
        found = [prober.reference()]
        found += [prober.probe(MODES[name], policy) for name in modes if name != "fp32"]
    finally:
        torch.set_float32_matmul_precision(before)
    return found
