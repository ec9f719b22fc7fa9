# SPDX-License-Identifier: Apache-2.0
"""What watches a run and where it reports to: the option `watch`, checked before anything starts.

In a config file:

    watch: {report_to: [wandb, tensorboard], project: my-project, on_spike: rollback}
"""

import dataclasses
import difflib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mprecipes.errors import ConfigError

SINKS = ("wandb", "tensorboard", "jsonl", "none")


class Options(Protocol):
    """What is used of a recipe's config."""

    @property
    def watch(self) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class WatchPolicy:
    """What watches a run and where it reports to.

    Attributes:
        report_to: of "wandb", "tensorboard" and "jsonl", or "none" alone; `metrics.jsonl` is
            written in any case.
        project: of W&B; None is WANDB_PROJECT or "mprecipes".
        entity: user or team in W&B; None is WANDB_ENTITY or the user's default.
        replica_check_steps: compare the weights of all ranks this often, and before each save;
            None is off.
        on_spike: whether a loss spike ends the run or takes it back to the checkpoint before, and
            on without the spike's samples; None is off.
        spike_window: updates whose losses the next one is judged by.
        spike_mads: a loss is high above their median + this many times their MAD.
        spike_updates: high losses in a row that are a spike.
        max_rollbacks: the next spike after so many ends the run.
        grad_norm_factor: alert when gradient norms are this many times above or below the median
            of the window; None is off.
        plateau_updates: alert when the loss has not fallen over so many updates; None is off.
        plateau_gain: share of the loss by which it has to fall in the second half of these.
    """

    report_to: tuple[str, ...] = ("jsonl",)
    project: str | None = None
    entity: str | None = None
    replica_check_steps: int | None = 500
    on_spike: Literal["stop", "rollback"] | None = "stop"
    spike_window: int = 128
    spike_mads: float = 6.0
    spike_updates: int = 3
    max_rollbacks: int = 3
    grad_norm_factor: float | None = 10.0
    plateau_updates: int | None = 2000
    plateau_gain: float = 0.002

    def __post_init__(self) -> None:
        if self.on_spike not in (None, "stop", "rollback"):
            raise _refused(
                "on_spike", self.on_spike, "stop, rollback or null", "write one of these"
            )
        for name, (_, least) in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None and not (value >= least and math.isfinite(value)):
                raise _refused(name, value, f"{least} or more", f"write {least} or more")


_NUMBERS: dict[str, tuple[type, float]] = {  # kind and least value
    "replica_check_steps": (int, 1),
    "spike_window": (int, 8),
    "spike_mads": (float, 1.0),
    "spike_updates": (int, 1),
    "max_rollbacks": (int, 0),
    "grad_norm_factor": (float, 1.5),
    "plateau_updates": (int, 20),
    "plateau_gain": (float, 0.0),
}
_MAY_BE_OFF = ("project", "entity", "replica_check_steps", "on_spike", "grad_norm_factor",
               "plateau_updates")  # fmt: skip


def _refused(name: str, value: object, expected: str, action: str) -> ConfigError:
    return ConfigError(
        f"{name} is {value!r}", expected=expected, where=f"{name} in option watch", action=action
    )


def watch_policy(config: Options) -> WatchPolicy:
    """Gives the policy that `watch` of a config says.

    Raises:
        ConfigError: an unknown name, or a value that is not what its name takes.
    """
    values = dict(config.watch or {})
    names = [field.name for field in dataclasses.fields(WatchPolicy)]
    for name, value in values.items():
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"unknown name {name}",
                expected=f"one of {', '.join(names)}; the nearest is {nearest}",
                where="option watch",
                action=f"write {nearest}, or remove it",
            )
        if name == "report_to":
            value = values[name] = (value,) if isinstance(value, str) else value
            is_right = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
        elif value is None:
            is_right = name in _MAY_BE_OFF
        elif name in _NUMBERS:
            kinds = (int,) if _NUMBERS[name][0] is int else (int, float)
            is_right = isinstance(value, kinds) and not isinstance(value, bool)
        else:
            is_right = isinstance(value, str)
        if not is_right:
            kind = "a whole number" if _NUMBERS.get(name, (str,))[0] is int else "a number"
            expected = kind if name in _NUMBERS else "text"
            raise _refused(
                name,
                value,
                "a list of names" if name == "report_to" else expected,
                "correct its type; quote a text that YAML reads as something else",
            )
    if "report_to" in values:
        values["report_to"] = tuple(values["report_to"])
    policy = WatchPolicy(**values)
    needing_trackers(policy.report_to)  # refused before anything is started
    return policy


def needing_trackers(report_to: Sequence[str]) -> list[str]:
    """Gives the names that need a tracker: not "jsonl", which is written in any case, nor "none".

    Raises:
        ConfigError: an unknown name, "none" beside others, or a package that is not installed.
    """
    names = list(dict.fromkeys(report_to))
    unknown = [name for name in names if name not in SINKS]
    if unknown or not names or ("none" in names and len(names) > 1):
        raise ConfigError(
            f"report_to is {names}",
            expected=f"some of {', '.join(SINKS[:-1])}, or none alone",
            where="report_to in option watch",
            action=f"remove {unknown[0]!r}" if unknown else "name what is to be reported to",
        )
    packages = ("tensorboard", "tensorboardX")
    if "tensorboard" in names and not any(map(importlib.util.find_spec, packages)):
        raise ConfigError(
            "report_to names tensorboard, which is not installed",
            expected="the package tensorboard or tensorboardX",
            where="report_to in option watch",
            action="pip install tensorboard, or remove it from report_to",
        )
    return [name for name in names if name not in ("jsonl", "none")]
