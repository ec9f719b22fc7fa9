# SPDX-License-Identifier: Apache-2.0
"""Prepared data: what the cache holds, what its fingerprint covers, how ranks share the work."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from mprecipes.compute.ranks import Ranks
from mprecipes.data.packing import agree, prepare_data
from mprecipes.errors import ConfigError, DataError, Preempted


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "rows.jsonl", [f"{i:03}" for i in range(64)])


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def prepare(source, cache, **changes):
    options = {"seq_length": 4, "ranks": Ranks(), "cache_dir": cache}
    return prepare_data(source=str(source), **(options | changes))


def test_a_document_of_one_row_is_one_row(source, tmp_path):
    """Texts one byte shorter than a row give one row each, in order, and facts that say so."""
    prepared = prepare(source, tmp_path / "cache")
    assert len(prepared.train) == 64
    assert prepared.train[63]["input_ids"].tolist() == [48, 54, 51, 256]
    assert prepared.heldout is None
    assert (prepared.vocab_size, prepared.eos_id) == (257, 256)
    facts = prepared.facts
    assert (facts["num_sequences"], facts["tokens"], facts["dropped_tokens"]) == (64, 256, 0)
    assert (facts["tokenizer"], facts["source"]) == ("bytes", str(source))
    assert (facts["seq_length"], facts["skipped_rows"]) == (4, {})
    assert (facts["heldout_rule"], facts["heldout_sequences"]) == ("none", 0)
    assert json.loads(json.dumps(facts)) == facts
    assert AutoTokenizer.from_pretrained(prepared.tokenizer_dir)("0")["input_ids"] == [48]


def test_the_second_launch_builds_nothing(source, tmp_path, capsys):
    """A published entry is used as it is, and nothing is announced."""
    first = prepare(source, tmp_path / "cache")
    before = first.train.path.stat()
    capsys.readouterr()
    second = prepare(source, tmp_path / "cache")
    assert second.facts == first.facts
    assert (second.train.path.stat().st_ino, capsys.readouterr().err) == (before.st_ino, "")


def test_the_fingerprint_covers_what_decides_the_rows(source, tmp_path):
    """Any byte of the source, the tokenizer, the row length and the held-out rule change it."""
    cache = tmp_path / "cache"
    prints = {prepare(source, cache).facts["fingerprint"]}
    prints.add(prepare(source, cache, seq_length=8).facts["fingerprint"])
    prints.add(prepare(source, cache, train_tokenizer_vocab=257).facts["fingerprint"])
    prints.add(prepare(source, cache, train_tokenizer_vocab=260).facts["fingerprint"])
    prints.add(prepare(source, cache, eval_fraction=0.25).facts["fingerprint"])
    stat = source.stat()
    source.write_text(source.read_text().replace("063", "064"))
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    prints.add(prepare(source, cache).facts["fingerprint"])
    assert len(prints) == 6


def test_the_fingerprint_ignores_paths_and_times(source, tmp_path):
    """A copy under another name, in another cache, at another time is the same data."""
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(source.read_bytes())
    os.utime(copy, (1, 1))
    one, two = prepare(source, tmp_path / "a"), prepare(copy, tmp_path / "b")
    assert one.facts["fingerprint"] == two.facts["fingerprint"]
    assert one.train.path.read_bytes() == two.train.path.read_bytes()


def test_a_trained_tokenizer_equals_itself_loaded_from_its_folder(source, tmp_path):
    """Training it and naming the folder of the trained one give the same rows and fingerprint."""
    trained = prepare(source, tmp_path / "cache", train_tokenizer_vocab=260)
    named = prepare(source, tmp_path / "cache", tokenizer=str(trained.tokenizer_dir))
    assert trained.vocab_size == named.vocab_size == 260
    assert trained.facts["fingerprint"] == named.facts["fingerprint"]
    assert trained.train.path.read_bytes() == named.train.path.read_bytes()
    assert trained.train.path != named.train.path


def test_an_evaluation_source_leaves_the_training_rows_alone(source, tmp_path):
    """Held-out text of its own goes through the same tokenizer and has its own fingerprint."""
    other = write(tmp_path / "eval.jsonl", ["abc", "abd"])
    plain = prepare(source, tmp_path / "cache")
    both = prepare(source, tmp_path / "cache", eval_source=str(other), eval_fraction=0.5)
    assert both.facts["fingerprint"] == plain.facts["fingerprint"]
    assert (len(both.train), len(both.heldout)) == (64, 2)
    assert both.heldout[1]["input_ids"].tolist() == [97, 98, 100, 256]
    assert both.facts["heldout_rule"] == "source"
    assert both.facts["heldout_fingerprint"] != both.facts["fingerprint"]
    trained = prepare(source, tmp_path / "cache", eval_source=str(other), train_tokenizer_vocab=258)
    assert trained.heldout[0]["input_ids"][-1] == trained.eos_id


def test_a_fraction_splits_the_rows(source, tmp_path):
    """A quarter of 64 one-row documents is held out, and no row is in both parts."""
    prepared = prepare(source, tmp_path / "cache", eval_fraction=0.25)
    parts = [
        [part[i]["input_ids"].tolist() for i in range(len(part))]
        for part in (prepared.train, prepared.heldout)
    ]
    assert (len(parts[0]), len(parts[1])) == (48, 16)
    assert prepared.facts["heldout_rule"] == "last_rows"
    assert bytes(parts[0][-1][:3] + parts[1][0][:3]) == b"047048"


def published(cache):
    return [path for path in (cache / "packed").iterdir() if not path.name.startswith(".lock")]


class AtCall:
    """A question whether to stop, answered with no; at one call it does something else before."""

    def __init__(self, number, action):
        self.number, self.action, self.calls = number, action, 0

    def __call__(self):
        self.calls += 1
        if self.calls == self.number:
            self.action()
        return False


def refused(source, cache, **changes):
    with pytest.raises(DataError) as caught:
        prepare(source, cache, **changes)
    error = caught.value
    assert error.found == "files that changed while they were read"
    assert "stays as it is during preparation" in error.expected
    assert "launch again" in error.action
    return error.where


@pytest.mark.parametrize("keeps_size_and_time", [False, True])
def test_a_source_rewritten_while_the_tokenizer_is_trained_is_refused(
    source, tmp_path, keeps_size_and_time
):
    """New rows never stand under the digest of the old ones; both versions work afterwards."""
    old, stat = source.read_bytes(), source.stat()
    size = 3 if keeps_size_and_time else 4

    def rewrite():
        new = write(tmp_path / "new.jsonl", ["z" * size] * 64)
        if keeps_size_and_time:
            os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        os.replace(new, source)

    options = {"train_tokenizer_vocab": 260}
    last_of_training = AtCall(64, rewrite)
    where = refused(source, tmp_path / "cache", should_stop=last_of_training, **options)
    assert (where, last_of_training.calls) == (str(source), 64)
    assert published(tmp_path / "cache") == []
    new = prepare(source, tmp_path / "cache", **options)
    source.write_bytes(old)
    again, fresh = (prepare(source, tmp_path / name, **options) for name in ("cache", "other"))
    assert again.facts == fresh.facts
    assert again.train.path.read_bytes() == fresh.train.path.read_bytes()
    assert again.facts["fingerprint"] != new.facts["fingerprint"]


def test_a_source_rewritten_while_the_lock_is_waited_for_is_refused(source, tmp_path):
    """The wait for another launch is part of the preparation."""
    entry = prepare(source, tmp_path / "cache").tokenizer_dir.parent
    shutil.rmtree(entry)
    with open(entry.with_name(f".lock-{entry.name}"), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def rewrite():
            write(source, ["new", "rows"])
            fcntl.flock(lock, fcntl.LOCK_UN)

        assert refused(source, tmp_path / "cache", should_stop=AtCall(1, rewrite)) == str(source)
    assert published(tmp_path / "cache") == []


def test_an_evaluation_source_rewritten_meanwhile_is_refused(source, tmp_path):
    """It is that of the launch too, although it is read after the training rows are published."""
    other = write(tmp_path / "eval.jsonl", ["abc", "abd"])
    rewrite = AtCall(1, lambda: write(other, ["new rows"]))
    options = {"eval_source": str(other), "should_stop": rewrite}
    assert refused(source, tmp_path / "cache", **options) == str(other)
    assert len(published(tmp_path / "cache")) == 1
    assert len(prepare(source, tmp_path / "cache", **options).heldout) == 2


def test_a_damaged_entry_is_prepared_anew(source, tmp_path, capsys):
    """A truncated file of the cache is noticed, said, and replaced by the right one."""
    good = prepare(source, tmp_path / "cache").train.path
    content = good.read_bytes()
    good.write_bytes(content[:-2])
    assert prepare(source, tmp_path / "cache").train.path.read_bytes() == content
    assert f"preparing {source} anew: {good}: 510 bytes" in capsys.readouterr().err


def test_skipping_once_allows_nothing_later(tmp_path):
    """Rows that one launch skipped are refused again by a launch that does not skip."""
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "abc"}\n{"text": 5}\n{"text": "abd"}\n')
    skipped = prepare(source, tmp_path / "cache", on_bad_rows="skip")
    assert (len(skipped.train), skipped.facts["skipped_rows"]) == (2, {"text is not a string": 1})
    with pytest.raises(DataError) as caught:
        prepare(source, tmp_path / "cache")
    assert caught.value.where == f"{source}:2"


def test_training_a_tokenizer_reports_bad_rows_and_stops(source, tmp_path):
    """The pass that trains the tokenizer raises the errors of any pass over the documents."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "abc"}\n{"text": 5}\n')
    with pytest.raises(DataError) as caught:
        prepare(bad, tmp_path / "cache", train_tokenizer_vocab=258)
    assert caught.value.where == f"{bad}:2"
    options = {"train_tokenizer_vocab": 258, "should_stop": lambda: True}
    with pytest.raises(Preempted):
        prepare(source, tmp_path / "cache", **options)


@pytest.mark.launch
@pytest.mark.parametrize("point", ["data.before_manifest", "data.before_publish"])
def test_a_killed_preparation_leaves_nothing_to_trust(source, tmp_path, point):
    """SIGKILL just before publication leaves no entry; the next launch sweeps and prepares it."""
    cache = tmp_path / "cache"
    code = (
        "from mprecipes.compute.ranks import Ranks\n"
        "from mprecipes.data.packing import prepare_data\n"
        "from pathlib import Path\n"
        f"prepare_data(source={str(source)!r}, seq_length=4, ranks=Ranks(),"
        f" cache_dir=Path({str(cache)!r}))"
    )
    env = {**os.environ, "MPRECIPES_FAULT": f"kill@{point}"}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == -9
    left = [path.name for path in (cache / "packed").iterdir() if not path.name.startswith(".lock")]
    assert len(left) == 1
    assert left[0].startswith(".building-")
    assert len(prepare(source, cache).train) == 64
    assert not list((cache / "packed").glob(".building-*"))


class Meeting:
    """Two ranks as two threads: what rank 0 shares is what both get."""

    def __init__(self):
        self.barrier, self.values = threading.Barrier(2, timeout=60), [None, None]

    def rank(self, number):
        meeting = self

        class Peer(Ranks):
            def gather(self, value):
                meeting.values[self.rank] = value
                meeting.barrier.wait()
                values = list(meeting.values)
                meeting.barrier.wait()
                return values

            def share(self, value):
                return self.gather(value)[0]

        return Peer(rank=number, world_size=2)


def together(function):
    meeting = Meeting()
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(function, meeting.rank(number)) for number in range(2)]
        return [future.exception() or future.result() for future in futures]


def test_rank_zero_prepares_for_all(source, tmp_path):
    """Both ranks get the same rows and facts, prepared once."""
    one, two = together(lambda ranks: prepare(source, tmp_path / "cache", ranks=ranks))
    assert one.facts == two.facts
    assert one.train[5]["input_ids"].tolist() == two.train[5]["input_ids"].tolist()


def test_an_error_of_rank_zero_is_raised_on_every_rank(tmp_path):
    """A rank that only waits gets the file and line too."""
    source = tmp_path / "rows.jsonl"
    source.write_text("{}\n")
    errors = together(lambda ranks: prepare(source, tmp_path / "cache", ranks=ranks))
    assert [error.where for error in errors] == [f"{source}:1"] * 2


def test_waiting_for_rank_zero_has_a_limit(source, tmp_path):
    """When the preparation takes longer than allowed, every rank says so instead of hanging."""
    has_given_up = threading.Event()

    def waits_for_ever() -> bool:
        return has_given_up.wait(60)

    def late(ranks):
        options = {"ranks": ranks, "should_stop": waits_for_ever, "wait_seconds": 0}
        try:
            return prepare(source, tmp_path / "cache", **options)
        finally:
            has_given_up.set()

    errors = together(late)
    assert [type(error) for error in errors] == [DataError, DataError]
    assert [error.where for error in errors] == ["rank 0", "rank 1"]
    assert "rank 0 has been preparing the data for 0 s" in errors[1].found
    assert "within this time" in errors[1].expected
    assert "one process" in errors[1].action


def test_ranks_with_another_cache_are_refused(source, tmp_path):
    """Machines that do not share the cache folder are told to, on every rank."""
    prepared = prepare(source, tmp_path / "cache")

    def fails_on_one(ranks):
        def open_it():
            if ranks.is_main:
                return prepared
            raise DataError("no file", expected="x", where="train.bin", action="y")

        return agree(ranks, open_it, tmp_path / "cache")

    errors = together(fails_on_one)
    assert [error.found for error in errors] == ["rank 1: train.bin: no file"] * 2
    assert "seen by every rank" in errors[0].expected
    assert errors[0].where == str(tmp_path / "cache")
    assert "MPRECIPES_CACHE" in errors[0].action


@pytest.mark.parametrize(
    ("changes", "where", "found"),
    [
        ({"seq_length": 1}, "seq_length", "seq_length 1"),
        ({"eval_fraction": 1.0}, "eval_fraction", "eval_fraction 1.0"),
        ({"train_tokenizer_vocab": 300, "tokenizer": "x"}, "train_tokenizer_vocab", "tokenizer x"),
    ],
)
def test_impossible_options_are_refused(source, tmp_path, changes, where, found):
    """Nothing is read before the options make sense together."""
    with pytest.raises(ConfigError) as caught:
        prepare(source, tmp_path / "cache", **changes)
    error = caught.value
    assert error.where == where
    assert found in error.found
    assert error.expected
    assert f"--{where}" in error.action
    assert not (tmp_path / "cache").exists()
