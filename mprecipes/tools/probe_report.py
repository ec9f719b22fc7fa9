# SPDX-License-Identifier: Apache-2.0
"""What `mprecipes probe` leaves behind: the record FP8 runs need, files, and verdicts in W&B."""

import json
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mprecipes.compute.validation import subject, write_record
from mprecipes.errors import ConfigError
from mprecipes.observe.policy import needing_trackers, watch_policy
from mprecipes.observe.report import plain
from mprecipes.observe.tracking import Tracking
from mprecipes.tools.probe import LIMITS, ModeFindings

VERDICTS = ("mode", "passed", "reason", "cause", "loss_gap", "worst_parameter", "relative_error",
            "cosine", "skipped_steps", "gradient_underflow", "tokens_per_second",
            "memory_bytes")  # fmt: skip
CLOSE_SECONDS = 90.0  # nothing waits for the end of a probe


@dataclass
class ProbeRun:
    """A probe as a tracker sees it: a run of its own each time."""

    path: Path
    wandb_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    run_id: str = "probe"
    attempt: int = 0
    is_main: bool = True


def track_probe(folder: Path | None, config: Any) -> Tracking:
    """Gives the tracking that `watch` of the recipe's config asks for.

    Raises:
        ConfigError: the option is malformed, or a tracker has no folder for its files.
    """
    policy = watch_policy(config)
    if folder is None and needing_trackers(policy.report_to):
        raise ConfigError(
            "watch: report_to names a tracker, and there is no folder for its files",
            expected="--output_dir",
            where="mprecipes probe",
            action="add for example --output_dir probe",
        )
    return Tracking(
        ProbeRun(folder or Path()), policy.report_to, project=policy.project, entity=policy.entity,
        close_seconds=CLOSE_SECONDS,
    )  # fmt: skip


def report_verdicts(tracking: Tracking, found: list[ModeFindings], folder: Path | None) -> None:
    """Leaves the losses of each mode, a table of verdicts and probe.json with the trackers.

    Args:
        tracking: begun.
        folder: of `write_findings`.
    """
    for number in range(max((len(f.losses) for f in found), default=0)):
        losses = {f"precision/probe_loss/{f.mode}": f.losses[number] for f in found if f.losses}
        tracking.log(number + 1, losses)
    rows = []
    for findings in found:
        name, error, cosine = findings.worst
        facts = {**findings.to_dict(), "worst_parameter": name, "relative_error": error}
        facts["cosine"] = cosine
        rows.append([facts[column] for column in VERDICTS])
    tracking.table(len(found[0].losses), "precision/probe", VERDICTS, rows)
    if folder is not None:
        tracking.report("probe", "probe", folder / "probe.json")


def keep_record(
    recipe_file: Path,
    recipe: Any,
    model_config: dict[str, Any],
    fp8_recipe: str,
    found: list[ModeFindings],
    steps: int,
) -> Path | None:
    """Writes the validation record beside the recipe, passed or not; None where FP8 was not run.

    Args:
        recipe: its `RECIPE`.
    """
    fp8 = next((f for f in found if f.mode == "fp8" and f.losses), None)
    if fp8 is None:
        return None
    about = subject(model_config, recipe=recipe.name, version=recipe.version, fp8_recipe=fp8_recipe)
    name, error, cosine = fp8.worst
    findings = {
        "passed": fp8.passed,
        "reason": fp8.reason,
        "cause": fp8.cause,
        "steps": steps,
        "loss_gap": fp8.loss_gap,
        "worst_gradient": {"parameter": name, "relative_error": error, "cosine": cosine},
        "limits": vars(LIMITS["fp8"]),
        "hidden_size": model_config.get("hidden_size"),
    }
    return write_record(recipe_file.parent, about, plain(findings))


def write_findings(folder: Path, found: list[ModeFindings]) -> None:
    """Writes probe.json and probe.png: losses of each mode, and the cosine of each gradient."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain([findings.to_dict() for findings in found]), indent=1)
    (folder / "probe.json").write_text(text + "\n", encoding="utf-8")
    from matplotlib.figure import Figure  # seconds, and here only

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for findings in found:
        if not findings.losses:
            continue
        left.plot(range(1, len(findings.losses) + 1), findings.losses, label=findings.mode)
        if findings.layers:
            cosines = [pair[1] for pair in findings.layers.values()]
            right.plot(range(len(cosines)), [1 - c for c in cosines], ".-", label=findings.mode)
    left.set(xlabel="step", ylabel="loss, nats per token", title="the same steps in each mode")
    right.set(
        xlabel="parameter, in the model's order", ylabel="1 - cosine to the FP32 gradient",
        yscale="log", title="gradients at the same weights",
    )  # fmt: skip
    left.legend()
    right.legend()
    figure.savefig(folder / "probe.png", dpi=120)
