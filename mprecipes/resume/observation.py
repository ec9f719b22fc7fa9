# SPDX-License-Identifier: Apache-2.0
"""A resumed run on probation: warm-up, observed steps, verdict.

Five checks (`evidence.py`) are filled while the state is loaded, by a probe that is repeated
(`probe.py`), and by the first steps, which are compared with their first pass (`replay.py`) or,
where there was none, with a band from the steps before the save (`band.py`). The verdict is the
same on every rank. Nothing is left to do afterwards but to count tokens per second.
"""

import time
from dataclasses import replace
from typing import Any, Protocol

from mprecipes.data.order import Position, SampleOrder
from mprecipes.errors import Preempted, ResumeHalted
from mprecipes.resume.checks import Check, Report
from mprecipes.resume.evidence import MEANINGS, PROMISES, Evidence
from mprecipes.resume.expected import expected_digests
from mprecipes.resume.journal import StepRecord
from mprecipes.resume.probe import Launch, Probe, Probed
from mprecipes.resume.rates import Rates
from mprecipes.resume.replay import MEANINGS as KEY_MEANINGS
from mprecipes.resume.replay import NUMERIC, Mismatch, Replay, causes
from mprecipes.resume.showing import ways_on
from mprecipes.resume.trial import (
    Trial,
    compare_probe,
    compare_replicas,
    judge_band,
    judge_environment,
    judge_network,
    judge_throughput,
)


class Manager(Protocol):
    """What is used of a CheckpointManager."""

    def freeze_retention(self) -> None: ...
    def release_retention(self) -> None: ...


class Probation:
    """Watches a resumed run until it has proved itself, or halts it.

    Every rank calls it alike. Only the main process writes the report. No checkpoint is deleted
    before the verdict, and new ones are marked provisional (`save_facts`).
    """

    def __init__(
        self, replay: Replay, report: Report, manager: Manager, evidence: Evidence, trial: Trial
    ) -> None:
        self._replay, self._report, self._manager = replay, report, manager
        self._evidence, self._trial = evidence, trial
        self._mismatches: list[Mismatch] = []
        self._observed: list[StepRecord] = []
        self._fresh: list[StepRecord] = []  # of these, without a first pass
        self._expected: dict[int, str] = {}
        self._rates, self._forward = Rates(), [0.0]
        self._environment_due = bool(trial.environment)
        self._network, self._repeats = trial.network(), True
        self._check = Check(
            "replay",
            "pending",
            policy="halt",
            expected=f"{replay.num_due} steps as in their first pass" if replay.num_due else None,
            found=None if replay.num_due else "no earlier attempt went beyond this step",
            tolerance=replay.tolerance,
            seconds=0.0,
            meaning="steps that were trained before come out as they did",
        )
        report.checks.extend([*evidence.rows.values(), self._check])
        self.verdict = "on_probation"
        self._last = replay.last_step
        if trial.manifest is not None:
            self._last = max(self._last, trial.manifest.step + evidence.policy.observed_steps)
        if trial.manifest is not None or replay.num_due:
            manager.freeze_retention()
            report.write(self.verdict)
        else:
            self._judge(alone=True)

    @property
    def on_probation(self) -> bool:
        """Whether there is no verdict yet."""
        return self.verdict == "on_probation"

    @property
    def num_due(self) -> int:
        """Steps that an earlier attempt trained beyond the checkpoint."""
        return self._replay.num_due

    @property
    def num_observed(self) -> int:
        """Steps to be observed before the verdict."""
        return self._last - self._trial.start

    @property
    def replayed_steps(self) -> int:
        """Steps compared with their first pass so far."""
        return self._replay.num_compared

    @property
    def wants_warm_up(self) -> bool:
        """Whether a checkpoint was loaded, so that its probe is to be repeated."""
        return self.on_probation and self._trial.manifest is not None

    def __enter__(self) -> "Probation":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, Preempted):
            self.close()

    def probe(self, launch: Launch, data: Any, order: SampleOrder, position: Position) -> Probe:
        """Collective: gives the probe that the save made; notes which batches are due.

        Args:
            data: as the training reads it.
            order: as the training reads it, whatever the position skips.
            position: where the training goes on.
        """
        trial = self._trial
        if trial.manifest is not None and "batch_digest" not in trial.relation.freed:
            stored, began = trial.manifest, time.monotonic()
            kept = replace(order, skipped=position.skipped)
            due = expected_digests(
                data, kept, launch.plan, stored, launch.ranks, self._evidence.policy.observed_steps
            )
            self._expected = {stored.step + 1 + number: text for number, text in enumerate(due)}
            self._evidence.rows["data_order"].seconds += time.monotonic() - began
        # a larger micro-batch than now might not fit: then replicas are compared, no more
        self._repeats = trial.probe.get("micro_batch", 0) <= launch.plan.micro_batch
        return Probe(launch, data, order, position, trial.probe if self._repeats else None)

    def warm_up(self, probed: Probed) -> None:
        """Compares the repeated probe with the stored one, and the replicas with each other.

        Raises:
            ResumeHalted: by policy of the check that owns the difference; the same on every rank.
        """
        if not self.wants_warm_up:
            return
        self._forward = probed.facts["forward_seconds"]
        self._evidence.tell("throughput", "forward_seconds by rank", self._forward)
        self._evidence.rows["optimizer"].seconds += probed.seconds
        if len(probed.grad_digests) > 1:
            compare_replicas(self._evidence, probed.grad_digests)
        if self._trial.probe and self._repeats:
            compare_probe(self._evidence, self._trial, probed.facts)
        if self._trial.numbers or not self._replay.num_due:
            self._judge_environment()
        self._halt_if_fatal("the warm-up")

    def _judge_environment(self) -> None:
        if self._environment_due:
            self._environment_due = False
            judge_environment(self._evidence, self._trial, self._replay.num_compared)

    def observe(self, record: StepRecord) -> None:
        """Compares one finished step with its first pass, or with what is due.

        Collective at the step that brings the verdict.

        Raises:
            ResumeHalted: the step is not what it was; the same on every rank.
        """
        self._rates.add(record.tokens, record.step_seconds, observed=self.on_probation)
        if not self.on_probation:
            return
        self._observed.append(record)
        before = self._replay.num_compared
        found = self._replay.compare(record)
        self._mismatches += found
        self._check.seconds += record.step_seconds
        for mismatch in found:
            self._evidence.note(
                "optimizer" if mismatch.key in NUMERIC else "data_order",
                mismatch.key, mismatch.expected, mismatch.found, agrees=False,
                tolerance=self._replay.tolerance, meaning=KEY_MEANINGS[mismatch.key][0],
                only_warns=mismatch.policy == "warn",
            )  # fmt: skip
        if self._replay.num_compared == before:
            self._fresh.append(record)
            self._compare_due(record)
        if self._evidence.fatal:
            self._halt(found)
        if record.step >= self._last:
            self._judge(alone=False)

    def _compare_due(self, record: StepRecord) -> None:
        """Where no first pass is known: the position and batch that follow from the checkpoint."""
        manifest, freed = self._trial.manifest, self._trial.relation.freed
        if manifest is None:
            return
        if "samples_seen" not in freed:
            done = record.step - manifest.step
            due = manifest.samples_seen + done * self._trial.global_batch
            self._evidence.note("data_order", "samples_seen", due, record.samples_seen)
        if record.step in self._expected:
            text = self._expected[record.step]
            self._evidence.note("data_order", "batch_digest", text, record.batch_digest)

    def save_facts(self, probed: Probed) -> dict[str, Any]:
        """Gives a manifest's `probe`, `throughput` and `provisional`.

        `provisional` names the attempt on whose verdict the checkpoint depends and the step that
        was released last; null once this run is released.
        """
        here = {"attempt": self._trial.attempt, "base": self._trial.base}
        return {
            "probe": probed.facts,
            "throughput": self._rates.facts() or self._trial.throughput,
            "provisional": here if self.on_probation else None,
        }

    @property
    def base(self) -> int:
        """Step of the checkpoint that was released last: this one's, or one from before it."""
        return self._trial.base

    def rolled_back(self, step: int) -> None:
        """Expects nothing of the steps after this one, to which the run went back."""
        self._replay.forget_after(step)
        self._expected = {n: text for n, text in self._expected.items() if n <= step}
        if self._trial.manifest is not None:
            observed = self._trial.manifest.step + self._evidence.policy.observed_steps
            self._last = max(self._replay.last_step, observed)

    def close(self) -> None:
        """Judges a run that ends on probation by the steps it has; without any it stays there.

        Not collective: the main process's own rate counts.
        """
        if self.on_probation and self._observed:
            self._judge(alone=True)

    def _judge(self, *, alone: bool) -> None:
        if self._trial.manifest is not None:
            judge_band(self._evidence, self._trial, self._fresh)
            rates = self._rates.observed
            rates = rates if alone else self._trial.ranks.gather(rates)[0]
            judge_throughput(self._evidence, self._trial, rates, self._forward)
            judge_network(self._evidence, self._trial, self._network)
            self._judge_environment()
        self._describe("warned" if self._mismatches else "passed", causes(self._mismatches))
        self._halt_if_fatal("the observed steps")
        self._evidence.settle()
        warned = any(check.verdict == "warned" for check in self._report.checks)
        self.verdict = "released_with_warnings" if warned else "released"
        self._report.write(self.verdict, self.replayed_steps, len(self._observed))
        if self._trial.manifest is not None or self._replay.num_due:
            self._trial.announce(self._report, self.verdict, self._numbers())
            self._manager.release_retention()

    def _numbers(self) -> dict[str, float]:
        return {
            "resume/released": float(self.verdict.startswith("released")),
            "resume/replayed_steps": self.replayed_steps,
            "resume/observed_steps": len(self._observed),
            "resume/checks_failed": len({f.check for f in self._evidence.failures}),
            "resume/probation_seconds": sum(c.seconds for c in self._report.checks),
            **self._trial.numbers,
        }

    def _halt_if_fatal(self, phase: str) -> None:
        if fatal := self._evidence.fatal:
            raise self.halted(
                f"{phase} after the resume came out otherwise than at the save: "
                + "; ".join(map(str, fatal))
                + f". {self._evidence.rows[fatal[0].check].meaning.capitalize()}",
                expected=PROMISES[fatal[0].check],
                where=f"step {self._observed[-1].step if self._observed else self._trial.start}, "
                f"check {fatal[0].check}",
                action=MEANINGS[fatal[0].check][1],
            )

    def _halt(self, found: list[Mismatch]) -> None:
        fatal = [mismatch for mismatch in found if mismatch.policy == "halt"]
        if not fatal:
            self._halt_if_fatal("a step")
            return
        self._describe("failed", fatal)
        first = fatal[0]
        meaning, remedy = KEY_MEANINGS[first.key]
        owners = ", ".join(dict.fromkeys(f.check for f in self._evidence.fatal))
        raise self.halted(
            f"check {owners}: the resumed run does not repeat what was trained before: "
            + "; ".join(map(str, fatal))
            + f". Usually: {meaning}",
            expected=f"the values of the first pass ({self._replay.tolerance})",
            where=f"step {first.step}, journal/attempt-{first.attempt:04d}.jsonl",
            action=f"{remedy}; then launch again from the same checkpoint. If the change is meant, "
            "start a new --output_dir",
        )

    def halted(self, found: str, *, expected: str, where: str, action: str) -> ResumeHalted:
        """Writes the report of a halt, tells it, and gives the error that ends the run."""
        self._evidence.settle()
        self.verdict = "halted"
        self._report.write(self.verdict, self.replayed_steps, len(self._observed))
        self._trial.announce(self._report, self.verdict, self._numbers())
        return ResumeHalted(
            found,
            expected=expected,
            where=where,
            action=action
            + ways_on(
                self._trial.attempt, self._trial.earlier, environment=bool(self._trial.environment)
            ),
        )

    def _describe(self, verdict: str, mismatches: list[Mismatch]) -> None:
        check, replay = self._check, self._replay
        check.verdict, check.tolerance = verdict, replay.tolerance
        if replay.num_due:
            counted = f"{replay.num_compared} of {replay.num_due} steps compared"
            check.found = "; ".join([counted, *map(str, mismatches)])
            for owner, keys in (("data_order", "data, schedule"), ("optimizer", "loss, grad_norm")):
                if not any((m.key in NUMERIC) == (owner == "optimizer") for m in mismatches):
                    self._evidence.note(
                        owner, f"replayed steps ({keys})", replay.num_due, counted, agrees=True,
                        tolerance=replay.tolerance,
                    )  # fmt: skip
        if mismatches:
            check.policy = mismatches[0].policy
            check.meaning = KEY_MEANINGS[mismatches[0].key][0]
