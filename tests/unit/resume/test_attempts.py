# SPDX-License-Identifier: Apache-2.0
"""What earlier attempts concluded, and which provisional checkpoints may be gone on from."""

import json
from types import SimpleNamespace

import pytest

from mprecipes.errors import ConfigError
from mprecipes.resume.attempts import (
    adopted_from,
    doubt,
    facts_of_attempts,
    halted,
    released_base,
    verdicts,
    was_chosen,
)


@pytest.fixture
def reports(tmp_path):
    """Writes reports of attempts from 1 on: (verdict, base)."""

    def write(*rows):
        for number, (verdict, base) in enumerate(rows, 1):
            report = {"attempt": number, "verdict": verdict, "base": base, "step": base}
            (tmp_path / f"attempt-{number:04d}.json").write_text(json.dumps(report))
        return tmp_path

    return write


def saved(step, attempt=None, base=0):
    """A manifest's view of a checkpoint, provisional when an attempt is named."""
    provisional = None if attempt is None else {"attempt": attempt, "base": base}
    return SimpleNamespace(step=step, raw={"provisional": provisional})


def test_verdicts_are_read_with_their_bases(reports):
    """A report of an older version has no base: its step is."""
    folder = reports(("released", 5), ("halted", 10))
    (folder / "attempt-0003.json").write_text('{"attempt": 3, "verdict": "released", "step": 7}')
    assert verdicts(folder) == {1: ("released", 5), 2: ("halted", 10), 3: ("released", 7)}
    assert halted(folder) == {2}


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", '{"attempt": 2}', '{"attempt": 2, "verdict": "x"}']
)
def test_a_report_that_cannot_be_read_is_refused_by_name(reports, text):
    """Whether its attempt was halted decides what may be resumed from."""
    folder = reports(("released", 5))
    (folder / "attempt-0002.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        verdicts(folder)
    assert error.value.where.endswith("/attempt-0002.json")
    assert error.value.found.startswith("not a resume report (")


def test_a_checkpoint_is_its_own_base_unless_it_is_provisional(reports):
    """Saved on probation by attempt 1 that was killed: the base is where attempt 1 began."""
    folder = reports(("on_probation", 5))
    assert released_base(saved(8), folder) == 8
    assert released_base(saved(7, attempt=1, base=5), folder) == 5


def test_a_release_of_the_chain_releases_what_it_saved(reports):
    """Attempt 2 went on from what attempt 1 saved, and was released."""
    folder = reports(("on_probation", 5), ("released_with_warnings", 5))
    assert released_base(saved(7, attempt=1, base=5), folder) == 7
    assert doubt(folder)(saved(7, attempt=1, base=5)) is None


def test_what_was_saved_before_a_halt_is_in_doubt(reports):
    """The killed attempt's checkpoint too: the halt was about where both came from."""
    folder = reports(("on_probation", 5), ("halted", 5))
    why = doubt(folder)
    assert (
        why(saved(7, attempt=1, base=5)) == "saved on probation by attempt 1; attempt 2 is halted"
    )
    assert why(saved(5)) is None
    assert why(saved(12, attempt=3, base=11)) is None


def test_after_a_kill_it_may_be_gone_on_from(reports):
    """Nobody has said no."""
    folder = reports(("on_probation", 5))
    assert doubt(folder)(saved(7, attempt=1, base=5)) is None


def test_a_choice_counts_once_released(tmp_path, reports):
    """The same command after a preemption does not go back again; after a halt it does."""
    reports(("released", 5), ("halted", 9))
    attempts = [{"attempt": 1, "resume_from": 5}, {"attempt": 2, "resume_from": 9, "contract": {}}]
    (tmp_path / "run.json").write_text(json.dumps({"attempts": attempts}))
    assert was_chosen(tmp_path, tmp_path, 5)
    assert not was_chosen(tmp_path, tmp_path, 9)
    assert facts_of_attempts(tmp_path) == {2: {}}


def test_a_checkpoint_of_another_run_is_refused_where_this_one_was_trained(tmp_path):
    """A copied folder is no checkpoint of this run; what a new folder went on from is."""
    theirs = SimpleNamespace(run_id="aaaa", folder=tmp_path / "step-00000005")
    assert adopted_from(theirs, tmp_path, "aaaa", is_trained=True) == {}
    assert adopted_from(theirs, tmp_path, "bbbb", is_trained=False) == {"adopted": "aaaa"}
    with pytest.raises(ConfigError) as error:
        adopted_from(theirs, tmp_path, "bbbb", is_trained=True)
    assert error.value.found == "step-00000005 is a checkpoint of run aaaa"
    assert error.value.expected == "checkpoints of this run, bbbb"
    assert error.value.where == "checkpoints/step-00000005/manifest.json"
    assert "--model_name_or_path" in error.value.action
    attempts = [{"attempt": 0, "adopted": "aaaa"}]
    (tmp_path / "run.json").write_text(json.dumps({"attempts": attempts}))
    assert adopted_from(theirs, tmp_path, "bbbb", is_trained=True) == {"adopted": "aaaa"}
