# SPDX-License-Identifier: Apache-2.0
"""Reads run folders with plain JSON and safetensors, never through the code under test."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def run_json(run: Path) -> dict[str, Any]:
    """Gives `run.json`."""
    return json.loads((run / "run.json").read_text(encoding="utf-8"))


def outcomes(run: Path) -> list[str | None]:
    """Gives the outcome of every attempt, oldest first."""
    return [attempt["outcome"] for attempt in run_json(run)["attempts"]]


def resume_report(run: Path, attempt: int) -> dict[str, Any]:
    """Gives the resume report of one attempt."""
    return json.loads((run / "resume" / f"attempt-{attempt:04d}.json").read_text(encoding="utf-8"))


def assert_released(report: dict[str, Any]) -> None:
    """Fails unless no check of a resume warned; of the speed, which is the machine's, one may.

    A run that ends on probation may have had nothing to judge by in the checks of the steps.
    """
    found = {check["name"]: check["verdict"] for check in report["checks"]}
    speed = found.pop("throughput")
    assert {found.pop(name) for name in ("bytes", "contract", "weights")} == {"passed"}, report
    assert {"optimizer", "data_order", "communication", "replay"} == found.keys(), report
    assert set(found.values()) <= {"passed", "not_judged"}, report
    expected = "released_with_warnings" if speed == "warned" else "released"
    assert report["verdict"] == expected, report


def attempt_lines(run: Path, attempt: int) -> list[dict[str, Any]]:
    """Gives the whole step lines of one attempt in file order; a torn last line is left out.

    Of steps that a rollback made void, and rollbacks themselves, see `rollbacks` and `journal`.
    """
    return [line for line in _lines(run, attempt) if "rollback" not in line]


def rollbacks(run: Path) -> list[dict[str, Any]]:
    """Gives the rollbacks of all attempts in the order they came."""
    paths = sorted((run / "journal").glob("attempt-*.jsonl"))
    attempts = [int(path.stem.removeprefix("attempt-")) for path in paths]
    lines = [line for attempt in attempts for line in _lines(run, attempt)]
    return [line["rollback"] for line in lines if "rollback" in line]


def _lines(run: Path, attempt: int) -> list[dict[str, Any]]:
    data = (run / "journal" / f"attempt-{attempt:04d}.jsonl").read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def journal(run: Path) -> dict[int, dict[str, Any]]:
    """Gives the journal line of every step as last made: later lines replace earlier ones.

    A rollback takes away the steps after the one it went back to.
    """
    steps: dict[int, dict[str, Any]] = {}
    for path in sorted((run / "journal").glob("attempt-*.jsonl")):
        for line in _lines(run, int(path.stem.removeprefix("attempt-"))):
            if "rollback" in line:
                kept = line["rollback"]["to_step"]
                steps = {step: steps[step] for step in steps if step <= kept}
            else:
                steps[line["step"]] = line
    return dict(sorted(steps.items()))


def trace(run: Path) -> dict[int, tuple[str, int, str, str]]:
    """Gives (batch digest, samples seen, learning rate, loss) of every step, floats as hex."""
    return {
        step: (
            line["batch_digest"],
            line["samples_seen"],
            float(line["learning_rate"]).hex(),
            float(line["loss"]).hex(),
        )
        for step, line in journal(run).items()
    }


def checkpoint(run: Path, step: int) -> Path:
    """Gives the folder of a published checkpoint."""
    return run / "checkpoints" / f"step-{step:08d}"


def manifest(run: Path, step: int) -> dict[str, Any]:
    """Gives the manifest of a published checkpoint."""
    return json.loads((checkpoint(run, step) / "manifest.json").read_text(encoding="utf-8"))


def checkpoint_steps(run: Path) -> list[int]:
    """Gives the steps of all published checkpoints, from their manifests, ascending."""
    found = (run / "checkpoints").glob("step-*/manifest.json")
    return sorted(json.loads(path.read_text(encoding="utf-8"))["step"] for path in found)


def quarantined(run: Path) -> list[str]:
    """Gives the names of the folders in quarantine."""
    folder = run / "quarantine"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Gives all tensors of a checkpoint by name, over all its files; a name in two files fails."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint(run, step).rglob("*.safetensors")):
        part = load_file(path)
        assert not found.keys() & part.keys(), f"{path}: repeats {found.keys() & part.keys()}"
        found |= part
    return found


def assert_same_state(run: Path, other: Path, step: int) -> None:
    """Fails unless both runs hold the same tensors at this step, bit by bit, optimizer included."""
    ours, theirs = tensors(run, step), tensors(other, step)
    assert ours.keys() == theirs.keys()
    kinds = {name.partition("/")[0] for name in ours}
    assert {"weights", "optimizer"} <= kinds, f"a checkpoint with only {sorted(kinds)}"
    different = [name for name in ours if not same_bits(ours[name], theirs[name])]
    assert different == [], f"step {step} of {run.name} and {other.name}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True when dtype, shape and every bit agree: -0.0 is not 0.0, a NaN is itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # also of bfloat16, unknown to NumPy


def assert_same_run(run: Path, other: Path) -> None:
    """Fails unless both runs made the same steps and end with the same checkpoint, bit by bit."""
    assert trace(run) == trace(other)
    steps, others = checkpoint_steps(run), checkpoint_steps(other)
    assert steps[-1:] == others[-1:] != []
    assert steps[-1] == max(trace(run))
    assert_same_state(run, other, steps[-1])
