# SPDX-License-Identifier: Apache-2.0
"""Is this launch the run that was interrupted? Every fact compared, all differences told at once.

A difference is `must_match` (a new run folder is needed), `may_change` (a named `--accept` flag is
needed) or `free` (noted only). Two kinds of facts are compared:

- *Measured* facts: the data's fingerprint, the batch, the precision that runs, the parameters.
- Config options, by the class their recipe gave them, each under `changed_<option>`.

An option that only produces a measured fact (a data path, `gradient_accumulation_steps`) is judged
by what it produced: where the fact is the same it is noted, where the fact differs the fact's flag
decides and the option needs none of its own. An option its recipe calls `must_match` always decides
for itself.
"""

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mprecipes.errors import ConfigError, ContractRefused

Kind = Literal["must_match", "may_change", "free"]
ABSENT = "(absent)"
ENVIRONMENT = "changed_environment"  # judged on probation, by what the change does to the numbers
MAX_NAMES = 10


@dataclass(frozen=True)
class Difference:
    """One fact that is not what it was.

    Attributes:
        flag: what `--accept` must name; None where nothing needs to, or nothing can, allow it.
    """

    field: str
    kind: Kind
    old: Any
    new: Any
    flag: str | None = None

    def __str__(self) -> str:
        old, new = self.old, self.new
        if isinstance(old, dict) and isinstance(new, dict) and self.kind != "must_match":
            names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
            old, new = ({n: side.get(n, ABSENT) for n in names} for side in (old, new))
        return f"{self.field}: {_text(old)} -> {_text(new)}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Fact:
    """A measured fact: where it stands in a manifest, and the options that only produce it.

    An optional one is compared only where both sides have it.
    """

    field: str
    kind: Kind
    path: tuple[str, ...]
    options: frozenset[str] = frozenset()
    flag: str | None = None
    default: Any = ABSENT
    is_optional: bool = False


def _fact(
    field: str, kind: Kind, path: str, options: str = "", flag: str | None = None,
    is_optional: bool = False,
) -> _Fact:  # fmt: skip
    names = tuple(path.split("."))
    return _Fact(field, kind, names, frozenset(options.split()), flag, is_optional=is_optional)


_BATCH = "per_device_train_batch_size gradient_accumulation_steps global_batch_size"
_DATA = (
    "dataset dataset_path dataset_name data train_data source text_field dataset_text_field"
    " on_bad_rows tokenizer tokenizer_name train_tokenizer_vocab seq_length max_seq_length"
    " eval_fraction"
)
_FACTS = (
    _fact("recipe", "must_match", "recipe.name"),
    _fact("recipe_version", "may_change", "recipe.version", flag="changed_recipe_version"),
    _fact("recipe_sha256", "free", "recipe.sha256"),
    _fact("data", "may_change", "data.fingerprint", _DATA, "changed_data"),
    _fact("data_rows", "may_change", "data.num_sequences", _DATA, "changed_data"),
    _fact("seed", "may_change", "data.seed", flag="changed_seed"),
    _fact("global_batch", "may_change", "data.global_batch", _BATCH, "changed_global_batch"),
    _fact("micro_batch", "may_change", "data.micro_batch", _BATCH, "changed_micro_batch"),
    _fact("precision", "may_change", "precision.mode", "precision", "changed_precision"),
    _Fact("engine", "may_change", ("topology", "sharding"), flag="changed_engine", default="ddp"),
    _Fact("frozen_weights", "must_match", ("frozen", "digest"), default="none"),
    _fact(
        "precision_settings",
        "may_change",
        "precision.settings",
        "numerics",
        "changed_precision",
        is_optional=True,
    ),
    _fact("fallback", "may_change", "precision.rungs", "", "changed_fallback", is_optional=True),
)


def compare(
    stored: Mapping[str, Any], current: Mapping[str, Any], classes: Mapping[str, str]
) -> list[Difference]:
    """Gives every difference between two sets of facts, once each, in a fixed order.

    Args:
        stored: a manifest as a dict; of its keys `recipe`, `precision`, `topology`, `data`,
            `environment`, `config`, and `params` with `shapes` are compared; without `params` on
            both sides, parameters are not.
        current: the same keys for this launch.
        classes: resume class per config option.
    """
    stored, current = json.loads(json.dumps([stored, current]))  # a tuple equals its stored list
    options = list(_options(stored, current, classes))
    fixed = {option.field for option in options if option.kind == "must_match"}
    facts = []
    for fact in _FACTS:
        old, new = (_find(side, fact.path, fact.default) for side in (stored, current))
        if fact.is_optional and ABSENT in (old, new):
            continue
        assert new != ABSENT, f"{'.'.join(fact.path)} is missing in the facts of this launch"
        if old != new and not fixed & {fact.field, *fact.options}:
            kind = _kind(fact, old, new)
            flag = fact.flag if kind == "may_change" else None
            facts.append(Difference(fact.field, kind, old, new, flag))
    reported = {fact.field for fact in facts}
    return [
        *(fact for fact in facts if fact.field != "data_rows" or "data" not in reported),
        *_parameters(stored, current),
        *(option for option in options if option.field not in reported),
        *_free("topology", stored, current),
        *_free("environment", stored, current),
    ]


def check_contract(
    stored: Mapping[str, Any],
    current: Mapping[str, Any],
    classes: Mapping[str, str],
    accepted: Collection[str],
    *,
    where: str,
) -> list[Difference]:
    """Gives the differences that are free or were accepted, to be logged and reported.

    Args:
        accepted: values of `--accept`.
        where: what `stored` was read from.

    Raises:
        ConfigError: `accepted` holds a name that allows nothing.
        ContractRefused: listing every difference that is not allowed.
    """
    check_accepted(accepted, classes)
    differences = compare(stored, current, classes)
    refused = [d for d in differences if d.kind != "free" and d.flag not in accepted]
    if not refused:
        return differences
    lines = [f"{d}   {_remedy(d)}" for d in refused]
    flags = list(dict.fromkeys([*sorted(accepted), *(d.flag for d in refused if d.flag)]))
    if all(d.flag for d in refused):
        action = f"undo the changes, or add --accept {' '.join(flags)} to mean them"
    else:
        action = "undo the changes, or start a new run with another --output_dir"
    raise ContractRefused(
        "this launch differs from the run it would continue:\n    " + "\n    ".join(lines),
        expected="the settings the run was interrupted with",
        where=where,
        action=action,
    )


def check_accepted(accepted: Collection[str], classes: Mapping[str, str]) -> None:
    """Refuses names that `--accept` does not know.

    Raises:
        ConfigError: naming the nearest name that would be valid.
    """
    produced: dict[str, list[str]] = {}
    for fact in _FACTS:
        for option in fact.options if fact.flag else ():
            produced.setdefault(f"changed_{option}", []).append(str(fact.flag))
    valid = (
        {ENVIRONMENT}
        | {fact.flag for fact in _FACTS if fact.flag}
        | {
            f"changed_{option}"
            for option, kind in classes.items()
            if kind == "may_change" and f"changed_{option}" not in produced
        }
    )
    for name in sorted(set(accepted) - valid):
        near = difflib.get_close_matches(name, sorted(valid), n=1, cutoff=0.0)
        better = dict.fromkeys(produced.get(name, near))
        raise ConfigError(
            f"--accept does not know {name!r}",
            expected=f"of {', '.join(sorted(valid))}",
            where="accept",
            action=f"use --accept {' or '.join(better)}",
        )


def _options(stored: Any, current: Any, classes: Mapping[str, str]) -> Iterator[Difference]:
    """Options that differ; one that only one side knows came or went with a version: noted."""
    old, new = stored.get("config") or {}, current.get("config") or {}
    produce = frozenset().union(*(fact.options for fact in _FACTS))
    for option in dict.fromkeys([*new, *old]):
        values = old.get(option, ABSENT), new.get(option, ABSENT)
        if values[0] == values[1]:
            continue
        kind = classes.get(option, "may_change")
        if ABSENT in values or kind == "free" or (option in produce and kind == "may_change"):
            yield Difference(option, "free", *values)
        elif kind == "must_match":
            yield Difference(option, "must_match", *values)
        else:
            yield Difference(option, "may_change", *values, f"changed_{option}")


def _kind(fact: _Fact, old: Any, new: Any) -> Kind:
    if fact.field == "recipe_version" and _major(old) == _major(new):
        return "free"  # minor and patch versions promise the same trace
    return fact.kind


def _major(version: str) -> str:
    return version.partition(".")[0]


def _parameters(stored: Any, current: Any) -> list[Difference]:
    """The model's parameters as one difference that names those which differ."""
    if "params" not in stored or "params" not in current:
        return []
    old, new = _described(stored), _described(current)
    names = [n for n in dict.fromkeys([*old, *new]) if old.get(n, ABSENT) != new.get(n, ABSENT)]
    if not names:
        return []
    before, now = ({n: side.get(n, ABSENT) for n in names[:MAX_NAMES]} for side in (old, new))
    more = f" ({MAX_NAMES} of {len(names)} shown)" if len(names) > MAX_NAMES else ""
    return [Difference(f"params{more}", "must_match", before, now)]


def _described(side: Any) -> dict[str, str]:
    return {name: f"{dtype} {side['shapes'][name]}" for name, dtype in side["params"].items()}


def _free(group: str, stored: Any, current: Any) -> list[Difference]:
    old, new = stored.get(group) or {}, current.get(group) or {}
    known = {fact.path for fact in _FACTS}
    return [
        Difference(f"{group}.{name}", "free", old.get(name, ABSENT), new.get(name, ABSENT))
        for name in dict.fromkeys([*old, *new])
        if old.get(name, ABSENT) != new.get(name, ABSENT) and (group, name) not in known
    ]


def _find(facts: Any, path: tuple[str, ...], default: Any = ABSENT) -> Any:
    for key in path:
        facts = facts.get(key, ABSENT) if isinstance(facts, dict) else ABSENT
    return default if facts == ABSENT else facts


def _remedy(difference: Difference) -> str:
    if difference.flag:
        return f"allow with --accept {difference.flag}"
    return "cannot be changed: start a new --output_dir"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    return str(value)
