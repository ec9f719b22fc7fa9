# SPDX-License-Identifier: Apache-2.0
"""Run folders with a training nobody made: curves, speed and memory are whatever a test needs.

Written as plain JSON, in the format a run leaves: `run.json`, `journal/`, `metrics.jsonl`.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

TOKENS = 2040  # a step
ENVIRONMENT = {"python": "3.11.2", "torch": "2.13.0", "cpu_model": "A Processor", "gpus": []}


def course(step: int, seed: int) -> float:
    """Gives the loss of a healthy FP32 run: from 5.5 towards 2, a little else for every seed."""
    return 2.0 + 3.5 * math.exp(-step / 20) + 0.01 * math.sin(3 * seed + 1)


def make_run(
    folder: Path,
    *,
    mode: str = "fp32",
    seed: int = 0,
    num_steps: int = 60,
    horizon: int | None = None,
    above: float = 0.0,
    plateau: float | None = None,
    tokens_per_second: float = 1000.0,
    memory_bytes: int = 700 << 20,
    grad_norm: float = 1.0,
    loss_scale: float | None = None,
    skipped: Sequence[int] = (),
    shifted: int = 0,
    weights: str | None = None,
    outcome: str = "finished",
    error: str | None = None,
    eval_steps: int | None = 10,
    stall_seconds: float = 0.0,
    **options: object,
) -> Path:
    """Writes a run; `above` is added to its loss in the end, `plateau` is where its loss stops.

    Args:
        shifted: its batches are those of as many steps later: another data order.
        options: of its config, on top of the ordinary ones.
    """
    (folder / "journal").mkdir(parents=True)
    journal, metrics, updates = [], [], 0
    if eval_steps:
        metrics.append({"attempt": 0, "step": 0, "eval/loss": course(0, seed)})
    for step in range(1, num_steps + 1):
        loss = course(step, seed) + above * step / num_steps
        loss = loss if plateau is None else max(loss, plateau)
        updates += step not in skipped
        journal.append({
            "attempt": 0, "step": step, "updates": updates, "samples_seen": 8 * step,
            "tokens": TOKENS, "batch_digest": f"{seed * 1000 + step + shifted:016x}", "loss": loss,
            "grad_norm": grad_norm * (1 + 5 / step), "learning_rate": 1e-3 / max(updates, 1),
            "loss_scale": loss_scale and loss_scale / 2 ** sum(s <= step for s in skipped),
            "skipped": step in skipped, "step_seconds": TOKENS / tokens_per_second,
        })  # fmt: skip
        if eval_steps and step % eval_steps == 0:
            metrics.append({"attempt": 0, "step": step, "eval/loss": loss + 0.05})
        if step % 10 == 0:
            metrics.append({"attempt": 0, "step": step, "perf/host_memory_bytes": memory_bytes})
    if stall_seconds:
        row = {"attempt": 0, "step": num_steps, "checkpoint/stall_seconds": stall_seconds}
        metrics.append(row)
    config = {"precision": mode, "seed": seed, "max_steps": horizon or num_steps,
              "learning_rate": 1e-3, "output_dir": folder.name, **options}  # fmt: skip
    contract = {
        "recipe": {"name": "pretrain_causal_lm", "version": "1.0.0", "status": "official",
                   "sha256": "ab" * 32},
        "precision": {"mode": mode, "compute_dtype": "float32"},
        "topology": {"engine": "NO", "world_size": 1, "device": "cpu"},
        "data": {"fingerprint": "cd" * 32, "global_batch": 8, "micro_batch": 4, "seed": seed},
        "environment": ENVIRONMENT,
        "config": config,
    }  # fmt: skip
    attempt = {
        "attempt": 0, "started": "2026-11-30T10:00:00+00:00", "ended": "2026-11-30T10:01:00+00:00",
        "outcome": outcome, "exit_code": 0 if outcome == "finished" else 1, "error": error,
        "step": num_steps, "horizon": horizon or num_steps, "world_size": 1, "contract": contract,
        "initial_weights": weights or f"{seed:016x}",
    }  # fmt: skip
    facts = {
        "schema": 1, "run_id": "0123456789ab", "wandb_id": f"{mode}{seed}0123456789"[:12],
        "recipe": contract["recipe"], "created": "2026-11-30T10:00:00+00:00",
        "horizon": horizon or num_steps, "attempts": [attempt],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(facts))
    _lines(folder / "journal" / "attempt-0000.jsonl", journal)
    _lines(folder / "metrics.jsonl", metrics)
    return folder


def _lines(path: Path, rows: list[dict]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text.replace("NaN", '"nan"').replace("Infinity", '"inf"'))


def make_arm(folder: Path, mode: str, seeds: Sequence[int] = (0, 1, 2), **changes) -> list[Path]:
    """Writes one run a seed; a list among the changes has one value per seed."""
    return [
        make_run(
            folder / f"{mode}-{seed}", mode=mode, seed=seed,
            **{k: v[i] if isinstance(v, list) else v for k, v in changes.items()},
        )
        for i, seed in enumerate(seeds)
    ]  # fmt: skip
