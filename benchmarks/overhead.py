# SPDX-License-Identifier: Apache-2.0
"""What the library costs per optimizer step, beside the same model in a bare PyTorch loop.

Rounds of both alternate in this one process: the recipe's own `main()`, timed by its journal (which
counts everything between two steps but evaluation and saves), and a bare loop over the same model,
optimizer, batch and autocast. The figure is the ratio of the medians.

Usage: python -m benchmarks.overhead [--rounds 4] [--steps 20] [--batch 8]
"""

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import mprecipes as mp

RECIPE = Path(__file__).parent.parent / "recipes" / "pretrain_causal_lm.py"
WARM_UP = 3


def load_recipe():
    spec = importlib.util.spec_from_file_location("pretrain_causal_lm", RECIPE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where classes look up their file
    spec.loader.exec_module(module)
    return module


def bare_seconds(recipe, config, steps: int) -> list[float]:
    """Times a loop that does nothing but train: forward, backward, clip, step."""
    torch.manual_seed(config.seed)
    model = recipe.build_model(config)
    optimizer = recipe.build_optimizer(model, config)
    shape = (config.per_device_train_batch_size, config.seq_length)
    ids = torch.randint(0, 256, shape)
    batch = {"input_ids": ids, "labels": ids}
    num_targets = shape[0] * (shape[1] - 1)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = recipe.compute_loss(model, batch) / num_targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_UP:]


def library_seconds(recipe, argv: list[str], output_dir: Path) -> list[float]:
    """Times the recipe's own main(), a whole run with its last save, by its journal."""
    sys.argv = [str(RECIPE), *argv, "--output_dir", str(output_dir)]
    recipe.main()
    records = mp.read_journals(output_dir / "journal").records[0]
    return [record.step_seconds for record in records][WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    os.environ["MPRECIPES_CPU_THREADS"] = str(torch.get_num_threads())
    recipe = load_recipe()
    tiny = RECIPE.parent / "configs" / RECIPE.stem / "tiny-cpu.yaml"
    argv = ["--config", str(tiny), "--max_steps", str(arguments.steps), "--eval_fraction", "none"]
    argv += ["--global_batch_size", "none"]
    argv += ["--per_device_train_batch_size", str(arguments.batch)]
    bare, library, ratios = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        config, _ = mp.parse_config(recipe.Config, [*argv, "--output_dir", folder])
        for round_ in range(arguments.rounds):
            ours = library_seconds(recipe, argv, Path(folder) / str(round_))
            peer = bare_seconds(recipe, config, arguments.steps)
            ratios.append(statistics.median(ours) / statistics.median(peer))
            bare, library = bare + peer, library + ours
    print(f"bare PyTorch loop: {statistics.median(bare) * 1e3:.1f} ms a step")
    print(f"recipe:            {statistics.median(library) * 1e3:.1f} ms a step")
    print(f"ratio by round:    {', '.join(f'{ratio:.4f}' for ratio in ratios)}")
    print(f"overhead:          {(statistics.median(ratios) - 1) * 100:+.2f} %")


if __name__ == "__main__":
    main()
