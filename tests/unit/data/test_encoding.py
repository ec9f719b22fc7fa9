# SPDX-License-Identifier: Apache-2.0
"""Documents into rows, and which of them are held out."""

import json

import numpy as np
import pytest

from mprecipes.data.corpus import open_corpus
from mprecipes.data.encoding import heldout_documents, pack_documents
from mprecipes.data.tokens import load_tokenizer
from mprecipes.errors import DataError, Preempted


def pack(folder, texts, *, seq_length=4, eval_fraction=None, should_stop=lambda: False):
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return pack_documents(
        open_corpus(source),
        load_tokenizer("bytes"),
        folder,
        seq_length=seq_length,
        eval_fraction=eval_fraction,
        should_stop=should_stop,
    )


def read(folder, name, seq_length=4):
    return np.fromfile(folder / name, dtype=np.uint16).reshape(-1, seq_length).tolist()


def test_documents_form_one_stream_with_an_eos_behind_each(tmp_path):
    """Rows cut the stream without a gap, and only the last partial row is dropped, and counted."""
    counts = pack(tmp_path, ["ab", "", "cdef", "g"])
    assert read(tmp_path, "train.bin") == [[97, 98, 256, 256], [99, 100, 101, 102]]
    assert counts == {
        "num_documents": 4,
        "skipped_rows": {},
        "dropped_tokens": 3,
        "heldout_rule": "none",
        "train": {"file": "train.bin", "first_row": 0, "num_rows": 2},
        "heldout": None,
    }


def test_many_documents_lose_no_token(tmp_path):
    """Over several batches of documents the stream stays whole and in order."""
    texts = [str(i) for i in range(3000)]
    counts = pack(tmp_path, texts, seq_length=7)
    stream = [token for text in texts for token in [*text.encode(), 256]]
    rows = read(tmp_path, "train.bin", 7)
    assert [token for row in rows for token in row] == stream[: 7 * len(rows)]
    assert 7 * len(rows) + counts["dropped_tokens"] == len(stream)
    assert counts["dropped_tokens"] < 7


def test_few_documents_hold_out_the_last_rows(tmp_path):
    """With fewer than 20 documents expected, the last rows are held out instead."""
    counts = pack(tmp_path, ["abc"] * 64, eval_fraction=0.25)
    assert counts["heldout_rule"] == "last_rows"
    assert counts["train"] == {"file": "train.bin", "first_row": 0, "num_rows": 48}
    assert counts["heldout"] == {"file": "train.bin", "first_row": 48, "num_rows": 16}


def test_many_documents_hold_out_whole_ones(tmp_path):
    """Every document is in one part as a whole, chosen by number, in the source's order."""
    texts = [f"{i:03}" for i in range(200)]
    counts = pack(tmp_path, texts, eval_fraction=0.1)
    assert counts["heldout_rule"] == "documents"
    train, heldout = (read(tmp_path, name) for name in ("train.bin", "heldout.bin"))
    told = [[int(bytes(row[:3])) for row in part] for part in (train, heldout)]
    assert sorted(told[0] + told[1]) == list(range(200))
    assert told[1] == np.flatnonzero(heldout_documents(0, 200, 0.1)).tolist()
    assert told[1][:4] == [33, 57, 71, 75]


def test_being_held_out_depends_on_the_number_alone():
    """The choice is the same in any batch, grows with the fraction, and is near it."""
    chosen = heldout_documents(0, 100_000, 0.1)
    assert (heldout_documents(5000, 100, 0.1) == chosen[5000:5100]).all()
    assert (heldout_documents(0, 100_000, 0.2) >= chosen).all()
    assert abs(chosen.mean() - 0.1) < 0.003


def test_text_too_short_for_a_row_is_refused(tmp_path):
    """Fewer tokens than one row is an error with the number that is there and that is needed."""
    with pytest.raises(DataError) as caught:
        pack(tmp_path, ["ab"], seq_length=8)
    error = caught.value
    assert error.found == "3 tokens in 1 documents, too few for a row of train.bin"
    assert error.expected.startswith("at least 8 tokens")
    assert error.where == str(tmp_path / "rows.jsonl")
    assert "--seq_length" in error.action


def test_a_single_row_cannot_be_held_out(tmp_path):
    """A held-out part never takes the only row there is to train on."""
    with pytest.raises(DataError, match="too few"):
        pack(tmp_path, ["abc"], eval_fraction=0.5)


def test_a_stop_ends_the_pass(tmp_path):
    """A run that is asked to stop while it prepares says that it can be launched again."""
    with pytest.raises(Preempted):
        pack(tmp_path, ["abc"] * 10, should_stop=lambda: True)


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path):
    """Rows of two versions of a file never stand in one cache entry."""
    source = tmp_path / "rows.jsonl"

    def appends() -> bool:
        with source.open("a") as file:
            file.write('{"text": "new"}\n')
        return False

    with pytest.raises(DataError) as caught:
        pack(tmp_path, ["abc"] * 10, should_stop=appends)
    error = caught.value
    assert error.found == "files that changed while they were read"
    assert "stays as it is" in error.expected
    assert error.where == str(source)
    assert "launch again" in error.action


def test_without_a_terminal_two_lines_are_printed(tmp_path, capsys):
    """A log file gets a line at the start and one at the end, with the counts."""
    pack(tmp_path, ["abc", "de"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"preparing {tmp_path / 'rows.jsonl'} ..."
    assert lines[1].startswith(f"preparing {tmp_path / 'rows.jsonl'}: 2 documents, 7 tokens in ")
    assert len(lines) == 2
