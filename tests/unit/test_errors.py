# SPDX-License-Identifier: Apache-2.0
"""Every error carries its four parts, its exit code and its outcome, also between processes."""

import pickle

import pytest

from mprecipes import errors

CODES = {
    "RecipeError": (1, "failed"),
    "ConfigError": (2, "refused"),
    "DataError": (2, "refused"),
    "RunFolderBusy": (2, "refused"),
    "RunFinished": (0, "finished"),
    "CheckpointError": (1, "failed"),
    "VerificationError": (3, "refused"),
    "NoTrustedCheckpoint": (3, "refused"),
    "ContractRefused": (3, "refused"),
    "ResumeHalted": (4, "halted"),
    "NumericsError": (5, "numerics"),
    "FellBack": (75, "fell_back"),
    "OutOfMemory": (1, "out_of_memory"),
    "Preempted": (75, "preempted"),
}
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.RecipeError)
}


def test_every_error_has_its_documented_exit_code_and_outcome():
    """0, 1, 2, 3, 4, 5 and 75 mean what the documentation says, for every class there is."""
    assert {name: (kind.exit_code, kind.outcome) for name, kind in KINDS.items()} == CODES


@pytest.mark.parametrize("name", CODES)
def test_the_message_holds_all_four_parts(name):
    """Found, expected, where and the next action are attributes and text."""
    error = KINDS[name]("3 rows", expected="4 rows", where="data.jsonl:7", action="add a row")
    assert (error.found, error.expected) == ("3 rows", "4 rows")
    assert (error.where, error.action) == ("data.jsonl:7", "add a row")
    assert str(error) == "data.jsonl:7: 3 rows\n  expected: 4 rows\n  next: add a row"


@pytest.mark.parametrize("name", CODES)
def test_an_error_travels_between_ranks(name):
    """What one rank raises, another can raise again: class and parts survive serialisation."""
    error = KINDS[name]("3 rows", expected="4 rows", where="rank 1", action="add a row")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is KINDS[name]
    assert str(copy) == "rank 1: 3 rows\n  expected: 4 rows\n  next: add a row"
    assert copy.action == "add a row"
