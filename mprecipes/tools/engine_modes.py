# SPDX-License-Identifier: Apache-2.0
"""`mprecipes env --modes --engines`: the dtypes of one step on each engine, measured in a launch.

    accelerate launch --config_file accelerate_configs/zero2.yaml .../engine_modes.py OUT.json

One process for each engine runs every mode that the engine offers: two micro-batches through two
Linear of 16 x 16, then weights, gradients, moments and the engine's own settings are looked at.
"""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from mprecipes.compute.engines import ENGINES
from mprecipes.compute.launch import Launch, start
from mprecipes.compute.precision import MODES, why_not
from mprecipes.compute.updates import flat_gradients, masters_of
from mprecipes.errors import ConfigError
from mprecipes.identity.config import Origins
from mprecipes.identity.recipe import Recipe, RecipeIdentity, identify
from mprecipes.tools.drill_launches import CHECKOUT, accelerate_launcher

TIMEOUT_SECONDS = 300
MEASURED = tuple(name for name in ENGINES if not name.endswith("_offload"))


@dataclass(frozen=True)
class EngineRow:
    """Dtypes of one mode on one engine, all measured but for `why`.

    Attributes:
        product: what a product of the model's Linear gives.
        weight, moment: what the optimizer keeps.
        gradient: what the optimizer reads.
        accumulation: of gradients over micro-batches.
        reduce: of gradients over processes.
        why: where nothing was measured, why.
    """

    engine: str
    mode: str
    product: str = ""
    weight: str = ""
    gradient: str = ""
    accumulation: str = ""
    reduce: str = ""
    moment: str = ""
    why: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass
class Options:
    """What `start` reads."""

    precision: str
    output_dir: str
    numerics: dict[str, Any] | None = None
    per_device_train_batch_size: int = 16
    gradient_accumulation_steps: int | None = 2
    global_batch_size: int | None = None
    max_grad_norm: float | None = 1.0


def measure_engines(names: Sequence[str] = MEASURED) -> list[EngineRow]:
    """Launches one process for each engine, one after the other; gives a row for each mode."""
    rows: list[EngineRow] = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            config = "cpu" if name == "ddp" and not torch.cuda.is_available() else name
            file = CHECKOUT / "accelerate_configs" / f"{config}.yaml"
            command = [*accelerate_launcher(file, 1), str(Path(__file__)), str(out)]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHECKOUT), *sys.path])}
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
            )
            if not out.exists():
                errors = [line for line in done.stderr.splitlines() if "Error: " in line]
                rows.append(EngineRow(name, "all", why=(errors or ["it did not start"])[0]))
                continue
            found = json.loads(out.read_text(encoding="utf-8"))
            rows += [replace(EngineRow(**row), engine=name) for row in found]
    return rows


def measure_mode_here(mode: str, folder: Path) -> EngineRow:
    """Collective: one step in a mode on the engine that the launcher asked for."""
    origins = Origins(dict.fromkeys(vars(Options(mode, "")), "default"))
    origins.allow_unvalidated_fp8 = True
    with start(Options(mode, str(folder)), origins) as launch:
        torch.manual_seed(1)
        model: Any = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        model = launch.convert(model.to(launch.device), _identity())
        products: list[torch.dtype] = []
        model[0].register_forward_hook(lambda _, __, output: products.append(output.dtype))
        optimizer: Any = torch.optim.AdamW(model.parameters())
        model, optimizer = launch.accelerator.prepare(model, optimizer)
        launch.check_masters(model)
        accumulated = None
        for _ in range(2):
            with launch.accelerator.accumulate(model):
                batch = torch.ones(16, 16, device=launch.device)
                launch.accelerator.backward(model(batch).float().mean())
            accumulated = accumulated or _accumulated(launch, model)
        launch.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found = {
            "product": products[0],
            "weight": _weight(launch, model),
            "gradient": _gradient(launch, model),
            "accumulation": accumulated,
            "moment": _moment(optimizer),
        }
        read = launch.measured["topology"].get("read_back", {})
        words = {name: str(kind).removeprefix("torch.") for name, kind in found.items()}
        words["reduce"] = read.get("reduce_dtype") or words["gradient"]  # DDP sums what there is
        return EngineRow(launch.engine.name, mode, **words)


def _identity() -> RecipeIdentity:
    return identify(Recipe(name="modes", version="1.0.0"), Path(__file__))


def _weight(launch: Launch, model: Any) -> torch.dtype:
    if launch.engine.zero_stage:
        return masters_of(model)[0].dtype
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def _gradient(launch: Launch, model: Any) -> torch.dtype:
    if launch.engine.zero_stage:
        return flat_gradients(model)[0].dtype
    dtype: torch.dtype = next(model.parameters()).grad.dtype
    return dtype


def _accumulated(launch: Launch, model: Any) -> torch.dtype:
    """After the first of two micro-batches. FSDP2 holds its whole gradient until the last.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py.
    """
    if launch.engine.zero_stage:
        dtype: str = launch.measured["topology"]["read_back"]["accumulate_dtype"]
        found: torch.dtype = getattr(torch, dtype)
        return found
    if launch.engine.name != "fsdp2":
        return _gradient(launch, model)
    unit = next(m for m in model.modules() if isinstance(m, FSDPModule))
    group: Any = unit._get_fsdp_state()._fsdp_param_group
    held = group.fsdp_params[0]
    grad = held.unsharded_accumulated_grad
    return (held.unsharded_param.grad if grad is None else grad).dtype  # type: ignore[no-any-return]


def _moment(optimizer: Any) -> torch.dtype:
    """Of the innermost optimizer, which accelerate and DeepSpeed wrap."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    state = next(iter(optimizer.state.values()))
    dtype: torch.dtype = state["exp_avg"].dtype
    return dtype


def main(out: Path, modes: Sequence[str] = tuple(MODES)) -> None:
    """In the launched process: each mode in a child of its own, since an engine starts but once."""
    fork, rows = multiprocessing.get_context("fork"), []
    for mode in modes:
        file = out.with_name(f"{mode}.json")
        child = fork.Process(target=_write_row, args=(mode, file))
        child.start()
        child.join()
        rows.append(json.loads(file.read_text(encoding="utf-8")))
    out.write_text(json.dumps(rows), encoding="utf-8")


def _write_row(mode: str, file: Path) -> None:
    file.write_text(json.dumps(_row(mode, file.parent).to_dict()), encoding="utf-8")


def _row(mode: str, folder: Path) -> EngineRow:
    with socket.socket() as free:  # the launcher's own store is for one start
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    refusal, _ = why_not(MODES[mode], torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if refusal is None:
        try:
            return measure_mode_here(mode, folder)
        except ConfigError as error:
            refusal = error.found
    return EngineRow("", mode, why=refusal)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
