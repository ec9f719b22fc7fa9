# SPDX-License-Identifier: Apache-2.0
"""Where exported weights come from: a page for people, and the same facts for the next run."""

import json
from collections.abc import Mapping
from typing import Any

from mprecipes.checkpoint.adapter_file import CONFIG
from mprecipes.checkpoint.manifest import Manifest

UNKNOWN = "not recorded"


def lineage_of(manifest: Manifest, pretrained: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Gives the value of `mprecipes.json`, from which a later run takes its ancestry."""
    recipe = manifest.raw["recipe"] or {}
    return {
        "schema": 1,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "root_sha256": manifest.root_sha256,
        "milestone": manifest.milestone,
        "recipe": {key: recipe.get(key) for key in ("name", "version", "sha256", "based_on")},
        "dtype": dtype,
        "ancestry": pretrained["ancestry"],
    }


def model_card(manifest: Manifest, pretrained: Mapping[str, Any], dtype: str) -> str:
    """Gives the text of `README.md`; nothing in it is estimated or left out silently."""
    raw = manifest.raw
    recipe, data, precision = (raw[key] or {} for key in ("recipe", "data", "precision"))
    frozen, is_adapter = raw.get("frozen") or {}, CONFIG in pretrained.get("texts", ())
    is_merged = bool(frozen) and not is_adapter
    num_parameters = frozen["parameters"] if is_merged else _num_parameters(manifest)
    base = {}
    if frozen:
        told = f"{frozen['parameters']:,} parameters, digest {frozen['digest']}"
        base = {"merged into" if is_merged else "frozen base": told}
    rows = {
        "architecture": f"adapters of a {pretrained['architecture']}"
        if is_adapter
        else pretrained["architecture"],
        "parameters": f"{num_parameters:,}",
        "weights": f"{dtype}, from FP32 masters" if dtype != "fp32" else "fp32, the masters",
        **base,
        "trained in": precision.get("mode"),
        "recipe": _joined("@", recipe.get("name"), recipe.get("version")),
        "recipe source, SHA-256": recipe.get("sha256"),
        "recipe based on": recipe.get("based_on") or "nothing",
        "data": data.get("source"),
        "data fingerprint": data.get("fingerprint"),
        "run": manifest.run_id,
        "step": manifest.step,
        "sequences seen": f"{manifest.samples_seen:,}",
        "tokens seen": f"{manifest.tokens_seen:,}",
        "milestone": manifest.milestone or "none",
        "checkpoint, SHA-256": manifest.root_sha256,
        "state digests": ", ".join(f"{k} {v}" for k, v in manifest.state_digests.items()),
    }
    table = [f"| {name} | {UNKNOWN if value is None else value} |" for name, value in rows.items()]
    metrics = raw.get("metrics") or {}
    measured = [f"| {name} | {value:.6g} |" for name, value in sorted(metrics.items())]
    ancestry = [f"{number}. {_ancestor(each)}" for number, each in
                enumerate(pretrained["ancestry"], start=1)]  # fmt: skip
    return "\n".join([
        "---",
        f"library_name: {'peft' if is_adapter else 'transformers'}",
        "tags:",
        "- mprecipes",
        "---",
        f"# {_joined(' ', recipe.get('name'), 'step', manifest.step)}",
        "",
        "| | |", "|---|---|", *table,
        "",
        "## Measured at this step",
        "",
        *(["| metric | value |", "|---|---|", *measured] if measured else ["Nothing."]),
        "",
        "## Ancestry",
        "",
        *(ancestry or ["These weights began from random numbers."]),
        "",
        "## Config of the run",
        "",
        "```json",
        json.dumps(manifest.config, indent=2),
        "```",
        "",
    ])  # fmt: skip


def _num_parameters(manifest: Manifest) -> int:
    total = 0
    for shape in manifest.shapes.values():
        size = 1
        for length in shape:
            size *= length
        total += size
    return total


def _ancestor(facts: Mapping[str, Any]) -> str:
    if "model" in facts:
        return str(facts["model"])
    recipe = facts.get("recipe") or {}
    name = _joined("@", recipe.get("name"), recipe.get("version"))
    return f"{name}, run {facts.get('run_id')}, step {facts.get('step')}, " + (
        f"checkpoint {facts.get('root_sha256')}, as {facts.get('dtype')}"
    )


def _joined(sign: str, *parts: object) -> str:
    return sign.join(str(part) for part in parts if part is not None) or UNKNOWN
