# SPDX-License-Identifier: Apache-2.0
"""Whether two runs may be compared: everything but the arm's own settings is equal, by digest.

Compared for each pair of runs of one seed: the recipe's source, the digest of the initial weights,
the data's fingerprint, the batch digest of every step both made, the learning rate of every update
both made, the stopping rule, the steps that were evaluated, and all other settings. An arm that
differs in one of them is refused, whatever its loss.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from mprecipes.identity.files import canonical_json
from mprecipes.tools.run_records import RunRecord

# What an arm is made of, and what says nothing about the training.
ARMS_OWN = frozenset({"precision", "numerics"})
FREE = frozenset({
    "output_dir", "watch", "checkpoint", "save_steps", "keep_last", "logging_steps",
    "dataloader_num_workers",
})  # fmt: skip
EQUAL_BATCH = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps"})


@dataclass(frozen=True)
class Sameness:
    """One thing that must be equal: how it is for FP32 and for the other run."""

    what: str
    seed: int | None
    expected: str
    found: str

    @property
    def equal(self) -> bool:
        return self.expected == self.found

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "equal": self.equal}


def compare_conditions(reference: RunRecord, run: RunRecord) -> list[Sameness]:
    """Gives everything that must be equal, in the order of a training."""
    sides = (reference, run)
    common = sorted(set(_by_step(reference)) & set(_by_step(run)))

    def pair(what: str, values: Iterable[Any]) -> Sameness:
        expected, found = (str(value) for value in values)
        return Sameness(what, run.seed, expected, found)

    batches = [[_by_step(side)[step].batch_digest for step in common] for side in sides]
    rates = [_rates(side) for side in sides]
    updates = sorted(rates[0].keys() & rates[1].keys())
    return [
        pair("recipe", map(_recipe, sides)),
        pair("seed", [side.seed for side in sides]),
        pair("initial weights", [side.initial_weights or _absent(side) for side in sides]),
        pair("data", [(side.facts.get("data") or {}).get("fingerprint") for side in sides]),
        pair(f"batches of {len(common)} steps", map(digest_of, batches)),
        pair(
            f"learning rates of {len(updates)} updates",
            [digest_of([each[update].hex() for update in updates]) for each in rates],
        ),
        pair("stopping rule", [f"{side.horizon} steps" for side in sides]),
        pair("evaluated steps", [_evaluated(side, common) for side in sides]),
        *_settings(reference, run),
    ]


def clip(text: str) -> str:
    """Gives a value as it is shown: a digest by its first 16 digits, a long text cut."""
    if re.fullmatch(r"[0-9a-f]{64}", text):
        return text[:16]
    return text if len(text) <= 60 else text[:57] + "..."


def digest_of(values: Any) -> str:
    """Gives the first 16 hex digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(canonical_json(values)).hexdigest()[:16]


def _recipe(run: RunRecord) -> str:
    """Name, version and the source's SHA-256 by its first 16 digits."""
    recipe = run.facts.get("recipe") or {}
    return f"{recipe.get('name')}@{recipe.get('version')} {str(recipe.get('sha256'))[:16]}"


def _by_step(run: RunRecord) -> dict[int, Any]:
    return {record.step: record for record in run.steps}


def _rates(run: RunRecord) -> dict[int, float]:
    """Learning rate by number of the update; a skipped step makes none."""
    return {record.updates: record.learning_rate for record in run.steps if not record.skipped}


def _absent(run: RunRecord) -> str:
    return f"not recorded by {run.path.name}"


def _evaluated(run: RunRecord, common: list[int]) -> str:
    last = common[-1] if common else 0
    return ", ".join(str(step) for step in run.heldout if step <= last) or "none"


def _settings(reference: RunRecord, run: RunRecord) -> list[Sameness]:
    """Gives a row for every other option that differs, or one that says that none does."""
    left, right = _flat(reference), _flat(run)
    names = sorted(left.keys() | right.keys())
    different = [
        Sameness(name, run.seed, str(left.get(name)), str(right.get(name)))
        for name in names
        if left.get(name) != right.get(name)
    ]
    return different or [
        Sameness(f"{len(names)} other settings", run.seed, digest_of(left), digest_of(right))
    ]


def _flat(run: RunRecord) -> dict[str, Any]:
    config, data = run.config, run.facts.get("data") or {}
    topology = run.facts.get("topology") or {}
    skipped = ARMS_OWN | FREE | EQUAL_BATCH | {"max_steps", "seed", "global_batch_size"}
    return {
        **{name: value for name, value in config.items() if name not in skipped},
        "global_batch_size": data.get("global_batch"),
        "processes": topology.get("world_size"),
        "engine": topology.get("engine"),
        "device": topology.get("device"),
    }


def settings_that_differ(runs: list[RunRecord]) -> dict[str, list[str]]:
    """Gives every setting that is not the same in all runs, and its value in each."""
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    rows = {name: [_text(run.config.get(name)) for run in runs] for name in names}
    for key in ("engine", "world_size", "device"):
        rows[key] = [_text((run.facts.get("topology") or {}).get(key)) for run in runs]
    return {
        name: values
        for name, values in rows.items()
        if len(set(values)) > 1 and name not in ("output_dir",)
    }


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
