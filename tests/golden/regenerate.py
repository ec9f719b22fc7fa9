# SPDX-License-Identifier: Apache-2.0
"""Records the golden loss traces again and shows what changed: `make golden`.

A trace is ten steps of a recipe on generated integers, per recipe major and precision, one process
and one thread. `traces/<recipe>-<major>-<precision>.json` holds the loss and gradient norm of every
step as float hex, and the Python, torch and CPU capability they were computed with.
"""

import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from mprecipes.identity.recipe import read_recipe
from tests.fix64 import RECIPE, options, write_rows
from tests.launching import launch
from tests.reading import journal

TRACES = Path(__file__).parent / "traces"
PRECISIONS = ("fp32", "bf16")


def made_with() -> dict[str, str]:
    """Gives what a trace's bits depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": _cpu(),
    }


def _cpu() -> str:
    """Gives family, model and stepping: two with the same instructions may round otherwise."""
    lines = Path("/proc/cpuinfo")
    facts = lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []
    said = dict(line.split(":", 1) for line in facts if ":" in line)
    known = {name.strip(): value.strip() for name, value in said.items()}
    names = ("cpu family", "model", "stepping")
    return "-".join(known[name] for name in names if name in known) or platform.processor()


def trace_path(precision: str) -> Path:
    recipe = read_recipe(RECIPE)
    return TRACES / f"{recipe.name}-{recipe.major}-{precision}.json"


def record(precision: str, folder: Path) -> dict[str, Any]:
    """Launches ten steps and gives their trace."""
    data = write_rows(folder / "rows.jsonl")
    words = options(data, folder / "run", precision=precision, gradient_accumulation_steps=2)
    done = launch(RECIPE, words)
    assert done.returncode == 0, done.output
    lines = journal(folder / "run").values()
    return {
        "recipe": read_recipe(RECIPE).name,
        "major": read_recipe(RECIPE).major,
        "precision": precision,
        "made_with": made_with(),
        "batch_digest": [line["batch_digest"] for line in lines],
        "loss": [float(line["loss"]).hex() for line in lines],
        "grad_norm": [float(line["grad_norm"]).hex() for line in lines],
    }


def main() -> None:
    TRACES.mkdir(exist_ok=True)
    for precision in PRECISIONS:
        path = trace_path(precision)
        old = json.loads(path.read_text()) if path.exists() else None
        with tempfile.TemporaryDirectory() as folder:
            new = record(precision, Path(folder))
        print(f"{path.name}: {'unchanged' if old == new else 'new' if old is None else 'changed'}")
        if old is not None:
            show_difference(old, new)
        path.write_text(json.dumps(new, indent=1) + "\n")


def show_difference(old: dict[str, Any], new: dict[str, Any]) -> None:
    for key in ("made_with", "batch_digest"):
        if old[key] != new[key]:
            print(f"  {key}: {old[key]} -> {new[key]}")
    for key in ("loss", "grad_norm"):
        for step, (a, b) in enumerate(zip(old[key], new[key]), start=1):
            if a != b:
                was, now = float.fromhex(a), float.fromhex(b)
                print(
                    f"  step {step} {key}: {was!r} -> {now!r} (relative {abs(now / was - 1):.1e})"
                )


if __name__ == "__main__":
    main()
