# SPDX-License-Identifier: Apache-2.0
"""The journal keeps every bit of every float, and says where it is torn."""

import json
import math
import os

import pytest

from mprecipes.errors import CheckpointError, VerificationError
from mprecipes.resume.journal import Journal, Rollback, decode, encode, read_journals


def write(folder, attempt, records):
    journal = Journal(folder, attempt, True)
    for record in records:
        journal.append(record)
    journal.close()
    return folder / f"attempt-{attempt:04d}.jsonl"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, b'"loss":0.1,'),
        (5e-324, b'"loss":5e-324,'),
        (-0.0, b'"loss":-0.0,'),
        (65536.0, b'"loss":65536.0,'),
        (2.0000000000000004, b'"loss":2.0000000000000004,'),
        (math.nan, b'"loss":"nan",'),
        (math.inf, b'"loss":"inf",'),
        (-math.inf, b'"loss":"-inf",'),
    ],
)
def test_a_float_is_the_shortest_strict_json_that_reads_back_to_the_same_bits(record, value, text):
    """Extreme and non-finite values survive the round trip bit for bit."""
    line = encode(record(loss=value))
    assert text in line
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    assert decode(line).loss.hex() == value.hex()


def test_a_line_is_on_disk_when_append_returns(tmp_path, record):
    """Nothing waits in a buffer that the death of the process would lose."""
    journal = Journal(tmp_path / "journal", 0, True)
    journal.append(record(1))
    text = (tmp_path / "journal" / "attempt-0000.jsonl").read_text()
    assert text.endswith("}\n")
    assert json.loads(text)["samples_seen"] == 8
    journal.close()


def test_records_come_back_equal_and_keys_are_those_of_the_design(tmp_path, record):
    """What is read is what was appended; the key order is part of the format."""
    written = [record(1), record(2, loss_scale=1024.0, skipped=True)]
    path = write(tmp_path, 0, written)
    assert read_journals(tmp_path).records == {0: written}
    assert list(json.loads(path.read_text().splitlines()[0])) == [
        "attempt",
        "step",
        "updates",
        "samples_seen",
        "tokens",
        "batch_digest",
        "loss",
        "grad_norm",
        "learning_rate",
        "loss_scale",
        "skipped",
        "step_seconds",
    ]


def test_only_the_main_process_writes(tmp_path, record):
    """Another rank leaves no file and no folder."""
    journal = Journal(tmp_path / "journal", 0, False)
    journal.append(record(1))
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_never_writes_into_the_journal_of_another(tmp_path, record):
    """A second journal of the same attempt is refused and the first stays as it was."""
    path = write(tmp_path, 1, [record(1, attempt=1)])
    before = path.read_bytes()
    with pytest.raises(VerificationError) as error:
        Journal(tmp_path, 1, True)
    assert error.value.found == "attempt 1 already has a journal"
    assert error.value.expected == "no file of that name: this attempt is only starting"
    assert error.value.where.endswith("attempt-0001.jsonl")
    assert "mprecipes status" in error.value.action
    assert path.read_bytes() == before


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_last_line_is_dropped_and_counted(tmp_path, record, cut):
    """Wherever the last line was cut, the lines before it count and it does not."""
    path = write(tmp_path, 0, [record(1), record(2)])
    first = encode(record(1))
    path.write_bytes(path.read_bytes()[: len(first) + cut])
    history = read_journals(tmp_path)
    assert history.records == {0: [record(1)]}
    assert history.torn == 1


def test_zeros_left_by_a_lost_machine_are_a_torn_last_line(tmp_path, record):
    """A tail of NUL bytes, as after a power cut, is dropped and counted."""
    path = write(tmp_path, 0, [record(1)])
    with path.open("ab") as file:
        file.write(b"\0" * 64)
    history = read_journals(tmp_path)
    assert (history.records, history.torn) == ({0: [record(1)]}, 1)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (b'{"attempt":0,"step":2,"upd', "not a whole record (Unterminated string"),
        (b"", "not a whole record (Expecting value"),
        (b"[]", "not a whole record (a list where an object belongs)"),
        (b'{"attempt":0}', "not a whole record (keys missing: step, updates,"),
    ],
)
def test_a_torn_line_in_the_middle_is_refused_with_file_and_line(tmp_path, record, damage, found):
    """A hole in the record is not a torn end: file, line and next action are named."""
    path = write(tmp_path, 0, [record(1)])
    path.write_bytes(encode(record(1)) + damage + b"\n" + encode(record(3)))
    with pytest.raises(VerificationError) as error:
        read_journals(tmp_path)
    assert error.value.found.startswith(found)
    assert error.value.expected.startswith("one record of this attempt a line, steps rising")
    assert error.value.where == f"{path}:2"
    assert error.value.action.startswith("the file changed after it was written: restore it")


@pytest.mark.parametrize("wrong", [{"step": 1}, {"attempt": 3}])
def test_a_line_of_another_attempt_or_step_is_refused(tmp_path, record, wrong):
    """Steps rise and belong to the file's attempt."""
    path = tmp_path / "attempt-0000.jsonl"
    path.write_bytes(encode(record(1)) + encode(record(**{"step": 2, **wrong})))
    with pytest.raises(VerificationError) as error:
        read_journals(tmp_path)
    assert error.value.where == f"{path}:2"


@pytest.mark.parametrize("wrong", [{"step": True}, {"loss": "big"}, {"batch_digest": 7}])
def test_a_value_of_another_type_is_not_a_record(record, wrong):
    """Types are checked, so that a comparison never compares texts with numbers."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        decode(encode(record(**wrong)))


def test_the_first_pass_is_the_latest_earlier_attempt_that_has_the_step(tmp_path, record):
    """Each step comes from the newest attempt before this one; left-out attempts do not count."""
    write(tmp_path, 0, [record(step) for step in (1, 2, 3)])
    write(tmp_path, 1, [record(2, attempt=1)])
    write(tmp_path, 2, [record(3, attempt=2)])
    history = read_journals(tmp_path)
    assert {s: r.attempt for s, r in history.first_pass(3).items()} == {1: 0, 2: 1, 3: 2}
    assert {s: r.attempt for s, r in history.first_pass(2).items()} == {1: 0, 2: 1, 3: 0}
    assert {s: r.attempt for s, r in history.first_pass(3, without=[1]).items()} == {
        1: 0,
        2: 0,
        3: 2,
    }
    assert history.first_pass(0) == {}


def test_no_folder_and_an_empty_file_hold_no_steps(tmp_path):
    """A run that never trained has an empty history."""
    assert read_journals(tmp_path / "none").records == {}
    Journal(tmp_path, 0, True).close()
    assert read_journals(tmp_path).records == {0: []}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_with_the_step(tmp_path, record):
    """A line that cannot be written stops the run by name."""
    journal = Journal(tmp_path, 0, True)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._descriptor)
    os.close(full)
    with pytest.raises(CheckpointError) as error:
        journal.append(record(7))
    assert error.value.found.startswith("the journal line of step 7 could not be written")
    assert "No space left on device" in error.value.found
    assert error.value.expected == "a line on disk for every step trained"
    assert error.value.where.endswith("attempt-0000.jsonl")
    assert error.value.action.startswith("free space")


def rollback(step, to_step, attempt=0, first=40):
    return Rollback(attempt, step, to_step, first, first + 8, math.nan, 0.5, "loss nan")


def journal_of(folder, attempt, *lines):
    with Journal(folder, attempt, True) as journal:
        for line in lines:
            journal.roll_back(line) if isinstance(line, Rollback) else journal.append(line)


def test_a_rollback_makes_later_steps_void(tmp_path, record):
    """Of a step made twice the later record counts; one that was not made again has none."""
    again = record(4, loss=1.5)
    journal_of(tmp_path, 0, *map(record, (1, 2, 3, 4, 5)), rollback(6, 3), again)
    history = read_journals(tmp_path)
    assert history.records == {0: [record(1), record(2), record(3), again]}
    (found,) = history.rollbacks
    assert (found.step, found.to_step, found.first, found.end) == (6, 3, 40, 48)
    assert math.isnan(found.loss)
    assert list(history.first_pass(1)) == [1, 2, 3, 4]


def test_a_rollback_reaches_into_earlier_attempts(tmp_path, record):
    """Attempt 1 went from step 4 to 6 and back to 2: of attempt 0 only two steps are left."""
    journal_of(tmp_path, 0, *map(record, (1, 2, 3, 4, 5)))
    new = record(3, 1, loss=1.5)
    journal_of(tmp_path, 1, record(5, 1), record(6, 1), rollback(7, 2, 1), new)
    assert read_journals(tmp_path).first_pass(2) == {1: record(1), 2: record(2), 3: new}
    assert read_journals(tmp_path).records == {0: [record(1), record(2)], 1: [new]}


@pytest.mark.parametrize(
    "wrong", [b'{"rollback":{"attempt":0}}', b'{"rollback":{"attempt":7,"step":6}}']
)
def test_a_rollback_that_is_none_is_refused(tmp_path, record, wrong):
    """Keys missing before another line; as the last line it is a torn one."""
    path = write(tmp_path, 0, [record(1)])
    with open(path, "ab") as file:
        file.write(wrong + b"\n")
    assert read_journals(tmp_path).torn == 1
    with open(path, "ab") as file:
        file.write(encode(record(2)))
    with pytest.raises(VerificationError, match="keys missing in a rollback"):
        read_journals(tmp_path)


def test_a_rollback_of_another_attempt_is_refused(tmp_path, record):
    """A journal holds lines of its own attempt only."""
    journal_of(tmp_path, 0, record(1), rollback(2, 1, attempt=3))
    with pytest.raises(VerificationError, match="attempt 3, step 2 after step 1"):
        read_journals(tmp_path)
