# SPDX-License-Identifier: Apache-2.0
"""Every precision mode on one GPU, in under four minutes: `make test-gpu`.

A Llama of about 160 M parameters: for each mode the dtypes of a step are measured and compared
with the table, ten steps are trained twice from the same weights and must be bit-equal, and speed,
model FLOP utilisation, peak memory and the longest kernels are printed. Without a GPU it refuses
and exits 2; `--dry_run` checks on the processor, with a tiny model, that the script works.
"""

import argparse
import sys
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from mprecipes.compute.float8 import convert_to_float8
from mprecipes.compute.policy import NumericsPolicy
from mprecipes.compute.precision import MODES, PrecisionMode, forbid_reduced_precision, why_not
from mprecipes.compute.scaling import LossScaler
from mprecipes.tools.modes import measure_step

LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
STEPS = 10
PEAK_FLOPS = {"fp32": 67e12, "tf32": 495e12, "bf16": 989e12, "fp16": 989e12, "fp8": 1979e12}  # H100


def build(mode: PrecisionMode, sizes: dict[str, int], device: torch.device) -> torch.nn.Module:
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "llama", vocab_size=32768 if sizes is LARGE else 272, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=1024, **sizes,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).float().to(device)
    if mode.name == "fp8":
        convert_to_float8(model, NumericsPolicy(), device)
    return model


def train(
    mode: PrecisionMode, sizes: dict[str, int], shape: tuple[int, int], device: torch.device
) -> tuple[list[float], float, int]:
    """Gives losses, seconds of the steps after the first two, and the number of parameters."""
    torch.set_float32_matmul_precision(mode.float32_matmul)
    model = build(mode, sizes, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = LossScaler(device.type, NumericsPolicy()) if mode.scaler else None
    losses, began = [], 0.0
    for step in range(STEPS):
        if step == 2:
            _wait(device)
            began = time.perf_counter()
        loss = _loss(mode, model, shape, step, device)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        fine = bool(norm.isfinite())
        if scaler is not None:
            scaler.settle(overflowed=not fine)
        if fine:
            optimizer.step()
            if scaler is not None:
                scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    _wait(device)
    seconds = time.perf_counter() - began
    return losses, seconds, sum(p.numel() for p in model.parameters())


def kernels(mode: PrecisionMode, sizes: dict[str, int], shape: Any, device: torch.device) -> str:
    """Gives the names of the three kernels that took longest in one forward and backward."""
    model = build(mode, sizes, device)
    _loss(mode, model, shape, 0, device).backward()
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as seen:
        _loss(mode, model, shape, 1, device).backward()
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = sorted(seen.key_averages(), key=lambda event: -getattr(event, key))
    return "; ".join(event.key[:60] for event in events[:3])


def _loss(mode: PrecisionMode, model: Any, shape: Any, step: int, device: Any) -> torch.Tensor:
    ids = torch.randint(0, model.config.vocab_size, shape,
                        generator=torch.Generator().manual_seed(step)).to(device)  # fmt: skip
    enabled = mode.autocast != "no"
    dtype = getattr(torch, mode.compute_dtype) if enabled else None
    with torch.autocast(device.type, dtype=dtype, enabled=enabled):
        logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry_run", action="store_true", help="on the processor, a tiny model")
    dry = parser.parse_args(argv).dry_run
    if not dry and not torch.cuda.is_available():
        print(
            "test-gpu: no CUDA device\n  expected: one GPU of capability 7.0 or newer\n"
            "  next: run it on a machine with a GPU, or python -m tests.gpu.modes --dry_run",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu" if dry else "cuda")
    sizes, shape = (TINY, (2, 16)) if dry else (LARGE, (8, 1024))
    forbid_reduced_precision()
    failed = 0
    for mode in MODES.values():
        refusal, note = why_not(mode, device)
        if refusal is not None:
            print(f"{mode.name}: not run: {refusal}")
            continue
        found = measure_step(mode, device)
        asked = found["product"] == mode.compute_dtype and found["weight"] == mode.master_dtype
        if not dry:
            torch.cuda.reset_peak_memory_stats(device)
        losses, seconds, parameters = train(mode, sizes, shape, device)
        again, _, _ = train(mode, sizes, shape, device)
        tokens = (STEPS - 2) * shape[0] * shape[1] / seconds
        memory = 0 if dry else torch.cuda.max_memory_allocated(device) / 2**30
        equal = losses == again
        failed += not (asked and equal)
        print(
            f"{mode.name}: {parameters / 1e6:.0f} M, asked = measured {asked}, repeated bit-equal "
            f"{equal}, loss {losses[0]:.4f} -> {losses[-1]:.4f}, {tokens:,.0f} tokens/s, MFU "
            f"{6 * parameters * tokens / PEAK_FLOPS[mode.name]:.3f} of an H100, peak {memory:.1f} "
            f"GiB{f', {note}' if note else ''}\n  {kernels(mode, sizes, shape, device)}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
