# SPDX-License-Identifier: Apache-2.0
"""The rows of the five checks."""

import pytest

from mprecipes.resume.evidence import MEANINGS, PROMISES, Evidence, within
from mprecipes.resume.policy import CHECKS, ProbationPolicy


def test_there_are_exactly_five_checks_with_a_meaning_each():
    """Their names and order are those of the report."""
    names = ("weights", "optimizer", "data_order", "communication", "throughput")
    assert names == CHECKS == tuple(PROMISES) == tuple(MEANINGS)
    assert tuple(Evidence(ProbationPolicy()).rows) == names


def test_what_agrees_passes_and_what_was_not_compared_is_not_judged():
    """Only a comparison makes a row pass."""
    evidence = Evidence(ProbationPolicy())
    assert evidence.note("weights", "digest", "aa", "aa", seconds=0.5)
    evidence.tell("throughput", "forward_seconds", [0.1])
    evidence.settle()
    rows = evidence.rows
    assert (rows["weights"].verdict, rows["weights"].seconds) == ("passed", 0.5)
    assert (rows["throughput"].verdict, rows["throughput"].found) == (
        "not_judged", {"forward_seconds": [0.1]},
    )  # fmt: skip
    assert evidence.fatal == []


def test_a_failure_halts_by_the_policy_of_its_check():
    """weights halts, throughput warns; the first failure gives the row its meaning."""
    evidence = Evidence(ProbationPolicy())
    assert not evidence.note("weights", "digest", "aa", "bb")
    assert not evidence.note("throughput", "rate", 100.0, 50.0, agrees=False, meaning="cold")
    evidence.note("data_order", "batch", 1, 2, only_warns=True)
    evidence.settle()
    verdicts = {name: row.verdict for name, row in evidence.rows.items()}
    assert verdicts == {
        "weights": "failed", "optimizer": "not_judged", "data_order": "warned",
        "communication": "not_judged", "throughput": "warned",
    }  # fmt: skip
    assert list(map(str, evidence.fatal)) == ["weights: digest is 'bb', expected 'aa'"]
    assert evidence.rows["weights"].meaning.startswith("usually: a corrupted file")
    assert evidence.rows["throughput"].meaning == "usually: cold"


def test_the_first_difference_of_a_fact_stays_on_the_record():
    """A later step that agrees again does not hide it, and it is counted once."""
    evidence = Evidence(ProbationPolicy())
    evidence.note("optimizer", "loss", 1.0, 2.0)
    evidence.note("optimizer", "loss", 3.0, 3.0)
    evidence.note("optimizer", "loss", 3.0, 4.0)
    assert evidence.rows["optimizer"].found == {"loss": 2.0}
    assert len(evidence.failures) == 1


@pytest.mark.parametrize(
    ("found", "tolerance", "agrees"),
    [(1.0, 0.0, True), (1.0 + 2**-52, 0.0, False), (1.009, 0.01, True), (1.02, 0.01, False)],
)
def test_bits_are_asked_for_without_a_tolerance(found, tolerance, agrees):
    """One unit in the last place is a difference; with 1 % it is not."""
    assert within(1.0, found, tolerance) is agrees
