# SPDX-License-Identifier: Apache-2.0
"""Is this training still worth going on with? Asked before every update, and of the replicas.

A loss spike (`spikes.py`) ends the run, or takes it back: to the newest checkpoint from before it,
and from there on without the samples of the spike's updates. Back means all state that a resume
restores. The rollback is a line of the journal, and the samples left out are part of the position
and of every later manifest (`skipped_samples`), so a resume leaves out the same ones. Checkpoints
from the way that was given up lie in `quarantine/` afterwards. The judged losses are in each
manifest under `guard`: a resumed run judges as the interrupted one would have.

The recipe asks; nothing here computes a gradient or applies one.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from mprecipes.checkpoint.manager import CheckpointManager
from mprecipes.checkpoint.manifest import Manifest
from mprecipes.checkpoint.replicas import compare_weights
from mprecipes.checkpoint.snapshot import live_tensors, working_copies
from mprecipes.compute.numerics import StepFacts
from mprecipes.compute.randomness import restore_random_state
from mprecipes.compute.ranks import BatchPlan, Ranks
from mprecipes.data.order import Position
from mprecipes.errors import NumericsError
from mprecipes.faults import fault_point
from mprecipes.resume.journal import Journal, Rollback, read_journals
from mprecipes.resume.spikes import SpikeDetector

COUNTERS = ("step", "updates", "samples_seen", "tokens_seen")


class Launched(Protocol):
    """What is used of `compute.launch.Launch`."""

    @property
    def ranks(self) -> Ranks: ...
    @property
    def plan(self) -> BatchPlan: ...
    @property
    def device(self) -> torch.device: ...


class Probation(Protocol):
    """What is used of `resume.observation.Probation`."""

    @property
    def on_probation(self) -> bool: ...
    @property
    def base(self) -> int: ...
    def rolled_back(self, step: int) -> None: ...


class Policy(Protocol):
    """What is used of the option `watch`."""

    @property
    def on_spike(self) -> str | None: ...
    @property
    def spike_window(self) -> int: ...
    @property
    def spike_mads(self) -> float: ...
    @property
    def spike_updates(self) -> int: ...
    @property
    def max_rollbacks(self) -> int: ...
    @property
    def replica_check_steps(self) -> int | None: ...


class Guard:
    """Watches the loss and the replicas of one run; made on every rank, after the resume.

    Every rank is given the same reduced values and so comes to the same answer by itself.

    Args:
        probation: hears of a rollback, after which the first pass is no measure.
        facts: of this launch; where its `data` are not those of the checkpoint, the losses from
            before are no measure and are forgotten.
        alert: told of a rollback, as (step, title, text).
    """

    def __init__(
        self,
        launch: Launched,
        manager: CheckpointManager,
        journal: Journal,
        probation: Probation,
        policy: Policy,
        *,
        facts: dict[str, Any],
        alert: Callable[[int, str, str], None],
    ) -> None:
        self._launch, self._manager, self._journal = launch, manager, journal
        self._probation, self._policy, self._alert = probation, policy, alert
        self._facts = facts
        self._spike: tuple[Position, StepFacts, str] | None = None
        self._resume(manager.restored)

    def facts(self) -> dict[str, Any]:
        """Gives the facts of this launch with what a later one needs to judge as this one does."""
        if self._policy.on_spike is None:
            return self._facts
        return {**self._facts, "guard": self._detector.state()}

    def trips(self, position: Position, seen: StepFacts) -> bool:
        """Whether the run has to turn back instead of making this update; then `roll_back` does it.

        Args:
            position: before the update.
            seen: the step as all ranks saw it.

        Raises:
            NumericsError: the run has to stop: its policy says so, there is no released checkpoint
                from before the spike, or it has turned back `max_rollbacks` times.
        """
        if self._policy.on_spike is None or seen.skipped:  # no update, nothing to judge
            return False
        first, _ = position.following(self._launch.plan.global_batch)
        reason = self._detector.judge(position.step + 1, first, seen.loss, seen.grad_norm)
        since = self._detector.since
        self._manager.keep_before(since[0] if since else None)
        if reason is None:
            return False
        self._spike = position, seen, reason
        if self._policy.on_spike != "rollback":
            raise self._stopped(
                'launch again with --watch \'{"on_spike": "rollback"}\' to go on from before it '
                "without these samples, or look at them, or lower --learning_rate with --accept"
            )
        done = len(position.skipped)
        if done >= self._policy.max_rollbacks:
            raise self._stopped(
                f"the run has turned back {done} times already, as often as max_rollbacks allows: "
                "look at the data, or lower --learning_rate with --accept"
            )
        if not self._released_before():
            raise self._stopped(
                "there is no released checkpoint from before it to turn back to: save more often, "
                "or look at these samples"
            )
        return True

    def roll_back(self) -> Position:
        """Collective: makes the live state that of the newest released checkpoint before the spike.

        Gives the position there, without the samples of the spike. Blocks for a save in flight and
        for reading the checkpoint. Gradients are the recipe's to forget.

        Raises:
            NoTrustedCheckpoint: no checkpoint from before the spike verifies.
        """
        assert self._spike is not None and self._detector.since is not None
        position, seen, reason = self._spike
        first, step = self._detector.since[1], position.step + 1
        end = position.following(self._launch.plan.global_batch)[1]
        fault_point("rollback.begin", step)
        why = f"led into a loss spike and was rolled back at step {step} ({reason})"
        manifest, rank_state = self._manager.restore_before(self._before(), why)
        if "random" in rank_state:
            restore_random_state(rank_state["random"], self._launch.device)
        self._journal.roll_back(
            Rollback(
                attempt=self._journal.attempt,
                step=step,
                to_step=manifest.step,
                first=first,
                end=end,
                loss=seen.loss,
                grad_norm=seen.grad_norm,
                reason=reason,
            )
        )
        fault_point("rollback.recorded", step)
        self._probation.rolled_back(manifest.step)
        self._resume(manifest)
        text = (
            f"{reason}; went back to step {manifest.step}, on without samples {first} to {end - 1}"
        )
        self._alert(step, "rolled back", text)
        self._spike = None
        back = Position(**{name: getattr(manifest, name) for name in COUNTERS})
        return replace(back, skipped=(*position.skipped, (first, end)))

    def check_replicas(self, step: int, *, saving: bool = False) -> None:
        """Collective: compares the weights of all ranks, when it is time or a save is to follow.

        Blocks for one pass over the weights; nothing with one process or without
        `replica_check_steps`.

        Raises:
            NumericsError: they are not the same bits everywhere; the rank and tensors are named.
        """
        every = self._policy.replica_check_steps
        if self._launch.ranks.world_size == 1 or every is None:
            return
        if saving or step % every == 0:
            model = self._manager.model
            live = live_tensors(model, self._manager.optimizer) | working_copies(model)
            compare_weights(live, self._launch.ranks, step)

    def _resume(self, manifest: Manifest | None) -> None:
        """Judges from here on as after the step of a checkpoint."""
        policy, state = self._policy, None
        if manifest is not None and manifest.data == self._facts.get("data"):
            state = manifest.raw.get("guard")
        self._detector = SpikeDetector(
            policy.spike_window, policy.spike_mads, policy.spike_updates, state
        )
        since = self._detector.since
        self._manager.keep_before(since[0] if since else None)

    def _before(self) -> int:
        """Checkpoints of this step and later are of the spike, or not released yet."""
        assert self._detector.since is not None
        began = self._detector.since[0]
        return min(began, self._probation.base + 1) if self._probation.on_probation else began

    def _released_before(self) -> bool:
        """Collective: whether there is a released checkpoint from before the spike."""
        self._manager.wait()
        ranks, limit = self._launch.ranks, self._before()
        return ranks.share(ranks.is_main and any(s < limit for s in self._manager.candidates()))

    def _stopped(self, action: str) -> NumericsError:
        assert self._spike is not None and self._detector.since is not None
        position, _, reason = self._spike
        began, first = self._detector.since
        _, end = position.following(self._launch.plan.global_batch)
        return NumericsError(
            f"{reason}; it began at step {began}",
            expected="a finite loss on the course of the updates before; this update was not made, "
            "and the newest checkpoint from before the spike is kept",
            where=f"step {position.step + 1}, samples {first} to {end - 1}",
            action=action,
        )


def without_skipped(
    position: Position, manifest: Manifest | None, journal: Path, ranks: Ranks
) -> Position:
    """Collective: gives the position with the samples that rollbacks took out of the run.

    Those in the manifest, and those that the journal knows of rollbacks to this checkpoint or a
    later one, which therefore came after it was made.

    Raises:
        VerificationError: the journal cannot be read; on every rank.
    """
    found: tuple[tuple[int, int], ...] = manifest.skipped_samples if manifest else ()
    error: Exception | None = None
    if ranks.is_main:
        try:
            rollbacks = read_journals(journal).rollbacks if _has_rollbacks(journal) else ()
            later = [(r.first, r.end) for r in rollbacks if r.to_step >= position.step]
            found += tuple(each for each in later if each not in found)
        except Exception as problem:  # noqa: BLE001 - raised again on every rank
            error = problem
    return replace(position, skipped=ranks.main_first(error, found))


def _has_rollbacks(journal: Path) -> bool:
    """Sought as bytes: a journal of millions of lines is parsed only for one that is there."""
    return any(b'{"rollback"' in path.read_bytes() for path in journal.glob("attempt-*.jsonl"))
