# SPDX-License-Identifier: Apache-2.0
"""What a run saves, keeps and copies: the option `checkpoint`, checked before anything starts.

In a config file:

    save_steps: 500
    keep_last: 3
    checkpoint: {save_minutes: 30, keep_best: eval/loss, mirror: "s3://bucket/runs"}
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mprecipes.errors import ConfigError
from mprecipes.identity.section import read_section

_LOWER_IS_BETTER, _HIGHER_IS_BETTER = ("loss", "perplexity"), ("accuracy",)
_OWN_OPTIONS = ("save_steps", "keep_last")


class Options(Protocol):
    """What is used of a recipe's config."""

    @property
    def save_steps(self) -> int: ...
    @property
    def keep_last(self) -> int: ...
    @property
    def checkpoint(self) -> dict[str, Any] | None: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def eval_steps(self) -> int | None: ...


@dataclass(frozen=True)
class CheckpointPolicy:
    """What a run saves, keeps and copies.

    Attributes:
        keep_last: rolling checkpoints that stay, at least 1.
        save_steps: steps between saves.
        save_minutes: also save when this much time passed since the last save; None is off.
        keep_every: checkpoints of steps that are multiples of this are never deleted.
        keep_best: evaluation metric whose best checkpoint is never deleted, "eval/loss" or, with
            the direction said, "eval/score:max".
        milestone_steps: steps that are saved, whatever `save_steps` says, and also copied to
            `milestones/step-...`.
        mirror: fsspec URL below which published checkpoints and milestones are copied to a folder
            with the run folder's name.
        on_save_failure: whether a run whose save failed goes on to the next save.
        verify_every_hours: re-hash everything kept this often, in the background; None is off.
        preemption_grace_seconds: time between the warning and the kill that the scheduler gives;
            None when nobody said.
        synchronous: saves block until they are published.
        on_each_node: the run folder lies on each node's own disk, with all checkpoints in each.
    """

    keep_last: int = 3
    save_steps: int = 500
    save_minutes: float | None = None
    keep_every: int | None = None
    keep_best: str | None = None
    milestone_steps: tuple[int, ...] = ()
    mirror: str | None = None
    on_save_failure: Literal["continue", "stop"] = "continue"
    verify_every_hours: float | None = None
    preemption_grace_seconds: float | None = None
    synchronous: bool = False
    on_each_node: bool = False

    def on_node(self, is_main: bool) -> "CheckpointPolicy":
        """Gives what one node has to do of it: one alone copies to the mirror."""
        return self if is_main else dataclasses.replace(self, mirror=None)

    def __post_init__(self) -> None:
        for name in ("keep_last", "save_steps", "keep_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _refused(name, repr(value), "1 or more", "write 1 or more")
        for name in ("save_minutes", "verify_every_hours", "preemption_grace_seconds"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise _refused(name, repr(value), "more than 0", "write a positive number, or null")
        if bad := [step for step in self.milestone_steps if step < 1]:
            raise _refused("milestone_steps", repr(bad[0]), "steps from 1 up", "remove it")
        if self.on_save_failure not in ("continue", "stop"):
            found = repr(self.on_save_failure)
            raise _refused("on_save_failure", found, "continue or stop", "write one of these")
        if self.keep_best is not None:
            split_metric(self.keep_best)
        if self.mirror is not None and not re.match(r"[A-Za-z][\w+.-]*://.", self.mirror):
            raise _refused(
                "mirror", repr(self.mirror), "an fsspec URL such as s3://bucket/runs",
                "write the protocol too: for a mounted file system file:///mnt/backup",
            )  # fmt: skip


def checkpoint_policy(config: Options) -> CheckpointPolicy:
    """Gives the policy that `save_steps`, `keep_last` and `checkpoint` of a config say.

    Raises:
        ConfigError: an unknown name, or a value that is not what its name takes; or `keep_best`
            where no step is both evaluated and saved.
    """
    policy = policy_of(config.checkpoint, save_steps=config.save_steps, keep_last=config.keep_last)
    if policy.keep_best is not None and not _can_know_the_best(policy, config):
        raise _refused(
            "keep_best",
            f"{policy.keep_best}, and no step is evaluated and saved (eval_steps "
            f"{config.eval_steps or 'none'}, save_steps {config.save_steps})",
            f"a step of both within max_steps {config.max_steps}",
            f"let save_steps be a multiple of eval_steps: --save_steps {config.eval_steps or 100} "
            f"--eval_steps {config.eval_steps or 100}",
        )
    return policy


def _can_know_the_best(policy: CheckpointPolicy, config: Options) -> bool:
    every, last = config.eval_steps, config.max_steps
    if every is None:
        return False
    steps = (math.lcm(every, policy.save_steps), *policy.milestone_steps, last)
    return any(step <= last and step % every == 0 for step in steps)


def policy_of(
    values: Mapping[str, Any] | None, *, save_steps: int = 500, keep_last: int = 3
) -> CheckpointPolicy:
    """Gives the policy of a mapping as it stands under `checkpoint`; likewise strict."""
    own_options = {"save_steps": save_steps, "keep_last": keep_last}
    policy = read_section(CheckpointPolicy, values, "checkpoint", **own_options)
    return dataclasses.replace(policy, milestone_steps=tuple(sorted(set(policy.milestone_steps))))


def split_metric(text: str) -> tuple[str, Literal["min", "max"]]:
    """Gives the metric and whether the lowest or the highest value is best.

    "eval/loss" and "eval/perplexity" are best when lowest, "eval/..._accuracy" when highest; others
    say it themselves: "eval/score:max".

    Raises:
        ConfigError: it is no metric's name, or its direction is not known.
    """
    name, colon, mode = text.partition(":")
    if not re.fullmatch(r"\w+/[\w/.-]+", name):
        raise _refused("keep_best", repr(text), "a metric such as eval/loss", "write its full name")
    if colon and mode not in ("min", "max"):
        raise _refused(
            "keep_best", repr(text), f"{name}:min or {name}:max", "say which value is best"
        )
    if mode == "min" or (not colon and name.endswith(_LOWER_IS_BETTER)):
        return name, "min"
    if mode == "max" or name.endswith(_HIGHER_IS_BETTER):
        return name, "max"
    raise _refused(
        "keep_best", f"{text!r}, of which it is not known what is best",
        f"{name}:min or {name}:max", "say whether the lowest or the highest value is best",
    )  # fmt: skip


def _refused(name: str, found: str, expected: str, action: str) -> ConfigError:
    where = f"option {name}" if name in _OWN_OPTIONS else f"{name} in option checkpoint"
    return ConfigError(f"{name} is {found}", expected=expected, where=where, action=action)
