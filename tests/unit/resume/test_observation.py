# SPDX-License-Identifier: Apache-2.0
"""A run on probation: warm-up, verdict, what is saved meanwhile, and how it ends."""

from types import SimpleNamespace

import pytest

import mprecipes as mp
from mprecipes.errors import Preempted, ResumeHalted
from mprecipes.resume.checks import Report
from mprecipes.resume.evidence import Evidence
from mprecipes.resume.policy import ProbationPolicy
from mprecipes.resume.probe import Probed
from mprecipes.resume.replay import Relation, Replay
from mprecipes.resume.trial import Trial
from tests.unit.resume.test_trial import RATE, STORED


class Manager:
    def __init__(self):
        self.calls = []

    def freeze_retention(self):
        self.calls.append("freeze")

    def release_retention(self):
        self.calls.append("release")


@pytest.fixture
def begin():
    """Gives a probation after a checkpoint of step 5 (40 samples), what it told, its manager."""

    def make(first_pass=(), policy=None, **facts):
        told, manager = [], Manager()
        raw = {"probe": STORED, "throughput": RATE}
        manifest = SimpleNamespace(raw=raw, step=5, samples_seen=40)
        announce = lambda report, verdict, numbers: told.append((verdict, dict(numbers)))  # noqa: E731
        trial = Trial(1, manifest, 5, 8, announce=announce, earlier=(2,), **facts)
        replay = Replay({r.step: r for r in first_pass}, {0: Relation()}, 1e-2)
        evidence = Evidence(policy or ProbationPolicy(observed_steps=3))
        return mp.Probation(replay, Report(None, {}, []), manager, evidence, trial), told, manager

    return make


def probed(**changes):
    facts = {**STORED, "forward_seconds": [0.1], **changes}
    return Probed(facts, ["a0"], 0.5)


def test_three_observed_steps_release_it(begin, record):
    """Frozen until then, told once, and what follows costs nothing but a count."""
    probation, told, manager = begin()
    probation.warm_up(probed())
    for step in (6, 7, 8):
        assert (probation.on_probation, manager.calls) == (True, ["freeze"])
        probation.observe(record(step, attempt=1, step_seconds=1.2))
    assert (probation.verdict, manager.calls) == ("released", ["freeze", "release"])
    ((verdict, numbers),) = told
    assert (verdict, numbers["resume/released"], numbers["resume/observed_steps"]) == (
        "released", 1.0, 3,
    )  # fmt: skip
    assert numbers["resume/throughput_ratio"] == pytest.approx(1.0)
    probation.observe(record(9, attempt=1, samples_seen=1))
    assert probation.verdict == "released"


def test_a_probe_that_differs_halts_before_the_first_step(begin):
    """Check, what is usual, and the ways on; told as halted, and nothing is released."""
    probation, told, manager = begin()
    with pytest.raises(ResumeHalted) as error:
        probation.warm_up(probed(loss=(2.5).hex()))
    assert error.value.found == (
        "the warm-up after the resume came out otherwise than at the save: optimizer: probe loss "
        "is 2.5 (0x1.4000000000000p+1), expected 2.0 (0x1.0000000000000p+1). Usually: same "
        "weights, same batch, another loss: dropout, precision or arithmetic changed"
    )
    assert error.value.expected == (
        "moments, step counts and loss are those of the run that was interrupted"
    )
    assert error.value.where == "step 5, check optimizer"
    assert "--resume_from 2 " in error.value.action
    assert (error.value.exit_code, told[0][0], manager.calls) == (4, "halted", ["freeze"])


def test_a_check_that_only_warns_lets_the_run_go_on(begin, record):
    """optimizer: warn; the verdict says so."""
    probation, _, _ = begin(policy=ProbationPolicy(observed_steps=3, optimizer="warn"))
    probation.warm_up(probed(loss=(2.5).hex()))
    for step in (6, 7, 8):
        probation.observe(record(step, attempt=1, step_seconds=1.2))
    assert probation.verdict == "released_with_warnings"


def test_a_position_that_does_not_follow_from_the_checkpoint_halts(begin, record):
    """Without any first pass: 48 samples are due at step 6."""
    probation, _, _ = begin()
    with pytest.raises(ResumeHalted) as error:
        probation.observe(record(6, attempt=1, samples_seen=44))
    assert "data_order: samples_seen is 44, expected 48" in error.value.found


def test_what_is_saved_on_probation_is_provisional(begin, record):
    """It names the attempt and the base; once released it does not."""
    probation, _, _ = begin()
    facts = probation.save_facts(probed())
    assert facts["provisional"] == {"attempt": 1, "base": 5}
    assert (facts["probe"]["loss"], facts["throughput"]) == (STORED["loss"], RATE)
    for step in (6, 7, 8):
        probation.observe(record(step, attempt=1, step_seconds=1.2))
    assert probation.save_facts(probed())["provisional"] is None


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (None, "released"),
        (Preempted("asked", expected="", where="", action=""), "released"),
        (ZeroDivisionError(), "on_probation"),
    ],
)
def test_a_run_that_ends_early_is_judged_unless_it_crashed(begin, record, error, verdict):
    """One observed step of three."""
    probation, _, _ = begin()
    try:
        with probation:
            probation.observe(record(6, attempt=1))
            if error is not None:
                raise error
    except (Preempted, ZeroDivisionError):
        pass
    assert probation.verdict == verdict
