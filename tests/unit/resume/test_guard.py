# SPDX-License-Identifier: Apache-2.0
"""A toy training asks its guard before every update: it goes back, or stops, and says why."""

import json
import math
from dataclasses import replace

import pytest
import torch

from mprecipes import Guard, Position, SampleOrder
from mprecipes.checkpoint.manifest import read_manifest
from mprecipes.compute.numerics import StepFacts
from mprecipes.compute.randomness import capture_random_state
from mprecipes.compute.ranks import BatchPlan, Ranks
from mprecipes.errors import NumericsError
from mprecipes.observe.policy import WatchPolicy
from mprecipes.resume.guard import without_skipped
from mprecipes.resume.journal import Journal, read_journals

POLICY = WatchPolicy(on_spike="rollback", spike_window=8, spike_updates=2)
ORDER, BATCH = SampleOrder(200, 3), 4
DATA = {"fingerprint": "f00d"}


class Launch:
    """What a guard knows of a launch."""

    ranks, plan, device = Ranks(), BatchPlan(BATCH, 1, 1, 0), torch.device("cpu")


class Probation:
    """Remembers which steps it was told to forget."""

    on_probation, base = False, 0

    def __init__(self):
        self.forgotten = []

    def rolled_back(self, step):
        self.forgotten.append(step)


class Training:
    """A toy training in one process; `losses` are those of samples in the whole order."""

    def __init__(self, run, state, bad, *, policy=POLICY, saves=(5, 10, 15), attempt=0, data=DATA):
        self.run, self.state, self.saves = run(attempt), state(), saves
        self.bad = {int(row): loss for sample, loss in bad.items() for row in ORDER(sample, 1)}
        self.manager = self.state.manager(self.run)
        self.journal = Journal(self.run.journal, attempt, True)
        self.probation, self.alerts = Probation(), []
        self.facts = {"data": data}
        self.position = Position()
        self.policy = policy

    def resume(self):
        manifest, _ = self.manager.restore_newest(lambda _: None)
        counters = ("step", "updates", "samples_seen", "tokens_seen")
        position = Position(**{name: getattr(manifest, name) for name in counters})
        self.position = without_skipped(position, manifest, self.run.journal, Ranks())
        return self

    def train(self, until, record):
        guard = self.guard = Guard(
            Launch(), self.manager, self.journal, self.probation, self.policy, facts=self.facts,
            alert=lambda *what: self.alerts.append(what),
        )  # fmt: skip
        made = []
        while self.position.step < until:
            rows = ORDER.rows(self.position, BATCH).tolist()
            loss = max(self.bad.get(row, 2.0 + row % 7 / 100) for row in rows)
            if guard.trips(self.position, StepFacts(loss, 1.0, "0" * 16, False, False)):
                self.position = guard.roll_back()
                continue
            self.state.train(1)
            torch.rand(1)
            self.position = self.position.advance(BATCH, 10)
            step = self.position.step
            made.append((step, rows))
            values = {"samples_seen": self.position.samples_seen, "loss": loss}
            self.journal.append(record(step, self.run.attempt, **values))
            if step in self.saves:
                self.manager.save(
                    self.position, facts=guard.facts(), wait=True,
                    rank_state={"random": capture_random_state(torch.device("cpu"))},
                )  # fmt: skip
        self.manager.close()
        self.journal.close()
        return made


BAD = {44: 9.0, 48: 9.0}  # samples of steps 12 and 13


def test_a_rollback_leaves_out_the_samples_of_the_spike(run, state, record):
    """Back at step 10, steps 11 to 15 are made of samples 40 to 43 and 52 on."""
    training = Training(run, state, BAD)
    made = training.train(15, record)
    assert [step for step, _ in made] == [*range(1, 13), *range(11, 16)]
    assert made[12:] == [
        (11, ORDER(40, 4).tolist()),
        *((step, ORDER(4 + 4 * step, 4).tolist()) for step in range(12, 16)),
    ]
    assert training.position == Position(15, 15, 60, 150, skipped=((44, 52),))
    (found,) = read_journals(training.run.journal).rollbacks
    assert (found.step, found.to_step, found.first, found.end, found.loss) == (13, 10, 44, 52, 9.0)
    assert training.probation.forgotten == [10]
    ((step, title, text),) = training.alerts
    assert (step, title) == (13, "rolled back")
    assert text.endswith("went back to step 10, on without samples 44 to 51")
    manifest = read_manifest(training.run.checkpoints / "step-00000015")
    assert manifest.skipped_samples == ((44, 52),)
    assert len(manifest.raw["guard"]["losses"]) == 8


def test_all_state_goes_back(run, state, record):
    """Weights and random numbers at the end are those of a run that never met the spike."""
    training = Training(run, state, BAD)
    torch.manual_seed(1)
    training.train(15, record)
    weights, draw = training.state.weights(), torch.rand(1)
    clean = Training(lambda attempt: replace(run(attempt), path=run(0).path / "clean"), state, {})
    torch.manual_seed(1)
    clean.train(15, record)
    assert clean.alerts == []
    assert (clean.state.weights(), torch.rand(1)) == (weights, draw)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_turns_back_at_once(run, state, record, value):
    """The first is enough, and its samples alone are left out."""
    training = Training(run, state, {44: value})
    training.train(15, record)
    assert training.position.skipped == ((44, 48),)


def test_the_rolled_back_checkpoint_is_set_aside(run, state, record):
    """A checkpoint of the spike's first step must never be found again."""
    training = Training(run, state, BAD, saves=(10, 12))
    training.train(14, record)
    assert training.manager.candidates() == [12]  # the new one
    manifest = read_manifest(training.run.checkpoints / "step-00000012")
    assert manifest.skipped_samples == ((44, 52),)
    reason = json.loads((training.run.quarantine / "step-00000012.reason.json").read_text())
    assert "rolled back at step 13" in reason["problems"][0]["found"]


@pytest.mark.parametrize("cut", [11, 13])
def test_a_resume_judges_and_skips_as_the_cut_run_would_have(run, state, record, cut):
    """Ended after step `cut` of the way without the spike: the journal has what is left out."""
    first = Training(run, state, BAD, saves=(10,))
    first.train(cut if cut == 13 else 13, record)
    second = Training(run, state, BAD, saves=(10,), attempt=1).resume()
    assert (second.position.step, second.position.skipped) == (10, ((44, 52),))
    made = second.train(15, record)
    assert made[0] == (11, ORDER(40, 4).tolist())
    assert made[1] == (12, ORDER(52, 4).tolist())
    assert second.alerts == []


def test_an_open_spike_is_resumed(run, state, record):
    """Stopped with one high loss behind it, the next process turns back at the second."""
    first = Training(run, state, BAD, saves=(10, 12))
    first.train(12, record)
    second = Training(run, state, BAD, saves=(15,), attempt=1).resume()
    assert second.position.step == 12
    second.train(15, record)
    assert second.position == Position(15, 15, 60, 150, skipped=((44, 52),))


def test_an_open_spike_keeps_the_checkpoint_from_before(run, state, record):
    """Of keep_last 1 steps 10 and 12 are there while the spike is open."""
    training = Training(run, state, {44: 9.0}, saves=(5, 10, 12, 14))
    training.train(12, record)
    assert training.manager.candidates() == [12, 10]
    again = Training(run, state, {44: 9.0}, saves=(14,), attempt=1).resume()
    again.train(14, record)
    assert again.manager.candidates() == [14]


def stopped(training, record, until=15):
    with pytest.raises(NumericsError) as caught:
        training.train(until, record)
    assert caught.value.exit_code == 5
    return caught.value


def test_a_policy_may_stop(run, state, record):
    """The error names loss, limit, first step, samples and what to do; nothing was turned back."""
    error = stopped(Training(run, state, BAD, policy=replace(POLICY, on_spike="stop")), record)
    assert error.found.startswith("loss 9 is above 2.")
    assert error.found.endswith("for 2 updates running; it began at step 12")
    assert error.where == "step 13, samples 44 to 51"
    assert error.expected.endswith("the newest checkpoint from before the spike is kept")
    assert '"on_spike": "rollback"' in error.action


def test_the_number_of_rollbacks_is_bounded(run, state, record):
    """The second spike is one too many for max_rollbacks 1."""
    bad = BAD | {56: 9.0, 60: 9.0}
    training = Training(run, state, bad, policy=replace(POLICY, max_rollbacks=1))
    error = stopped(training, record)
    assert error.action.startswith("the run has turned back 1 times already")
    assert training.position.skipped == ((44, 52),)


def test_several_rollbacks_add_up(run, state, record):
    """Two spikes, each left out; the second one's numbers are of the whole order."""
    training = Training(run, state, BAD | {56: 9.0, 60: 9.0})
    training.train(20, record)
    assert training.position.skipped == ((44, 52), (56, 64))
    assert training.position.samples_seen == 80


def test_without_a_checkpoint_from_before_it_stops(run, state, record):
    """There is nothing to go back to; the checkpoints that are there stay."""
    training = Training(run, state, BAD, saves=(12,))
    error = stopped(training, record)
    assert error.action.startswith("there is no released checkpoint from before it")
    assert training.manager.candidates() == [12]


def test_a_checkpoint_made_on_probation_is_not_gone_back_to(run, state, record):
    """Resumed from 5 and not released yet, the run passes over its own step 10."""
    Training(run, state, BAD, saves=(5,)).train(6, record)
    second = Training(run, state, BAD, saves=(10, 15), attempt=1).resume()
    second.manager.freeze_retention()
    second.probation.on_probation, second.probation.base = True, 5
    made = second.train(13, record)
    assert [step for step, _ in made] == [*range(6, 13), *range(6, 14)]


def test_other_data_are_judged_by_themselves(run, state, record):
    """After an accepted change of the data the losses from before are forgotten."""
    Training(run, state, {}, saves=(10,)).train(10, record)
    other = Training(run, state, {}, attempt=1, data={"fingerprint": "beef"}).resume()
    other.train(11, record)
    assert len(other.guard.facts()["guard"]["losses"]) == 1


def test_a_guard_that_is_off_judges_nothing(run, state, record):
    """The loss may do what it wants, and nothing is noted."""
    training = Training(run, state, BAD, policy=replace(POLICY, on_spike=None))
    assert len(training.train(15, record)) == 15
    assert training.guard.facts() == {"data": DATA}


@pytest.mark.parametrize(
    ("step", "saving", "compared"), [(4, False, 0), (5, False, 1), (4, True, 1), (5, True, 1)]
)
def test_replicas_are_compared_when_it_is_time_or_a_save_follows(
    run, state, monkeypatch, step, saving, compared
):
    """Every replica_check_steps, and before a save whatever the step; one process never."""
    calls = []
    monkeypatch.setattr("mprecipes.resume.guard.compare_weights", lambda *what: calls.append(what))
    training = Training(run, state, {}, policy=replace(POLICY, replica_check_steps=5))
    training.train(0, None)
    training.guard.check_replicas(step, saving=saving)
    assert calls == []
    monkeypatch.setattr(Launch, "ranks", Ranks(0, 2))
    training.guard.check_replicas(step, saving=saving)
    assert len(calls) == compared
    training.policy = replace(POLICY, replica_check_steps=None)
    training.train(0, None)
    training.guard.check_replicas(step, saving=saving)
    assert len(calls) == compared


def test_a_skipped_update_is_not_judged(run, state):
    """What a loss scaler leaves out is no update: neither a spike nor part of the window."""
    training = Training(run, state, {})
    training.train(0, None)
    seen = StepFacts(math.nan, math.inf, "0" * 16, False, False, skipped=True)
    assert training.guard.trips(Position(), seen) is False
    assert training.guard.facts()["guard"] == {"losses": [], "running": 0, "since": None}
