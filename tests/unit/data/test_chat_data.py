# SPDX-License-Identifier: Apache-2.0
"""Conversations prepared once: labels packed or not, counts, cache, held-out rows, mixtures."""

import json

import numpy as np
import pytest

from mprecipes.compute.ranks import Ranks
from mprecipes.data.chat_data import prepare_chats
from mprecipes.data.chat_options import ChatOptions
from mprecipes.data.tokens import load_tokenizer
from mprecipes.errors import DataError
from tests.chats import BY_NAME, SHAPES, conversations, expected, tokenizer, write_jsonl


def chat(user, answer):
    turns = [("user", user), ("assistant", answer)]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def prepared(tmp_path, source, shape=None, **changed):
    names = set(ChatOptions.__dataclass_fields__)
    options = ChatOptions(**{key: changed.pop(key) for key in names & set(changed)})
    given = {
        "sources": {str(source): 1.0},
        "tokenizer": tokenizer(shape) if shape else load_tokenizer("bytes"),
        "seq_length": 64,
        "eval_fraction": None,
        "ranks": Ranks(),
        "cache_dir": tmp_path / "cache",
    }
    return prepare_chats(options=options, **{**given, **changed})


@pytest.mark.parametrize("padding_side", ["right", "left"])
@pytest.mark.parametrize("batching", ["packed", "plain"])
def test_labels_of_every_shape_packed_and_padded_on_either_side(tmp_path, batching, padding_side):
    """72 conversations of seven shapes each: every piece's labels are the renderer's, none lost."""
    for shape in SHAPES:
        chats = conversations(shape, 72)
        source = write_jsonl(tmp_path / f"{shape.name}.jsonl", chats)
        data = prepared(
            tmp_path, source, shape, seq_length=700, batching=batching, padding_side=padding_side
        ).train
        found = []
        for item in data.__getitems__(list(range(len(data)))):
            segments = item["segment_ids"]
            pads = (segments < 0).nonzero().flatten().tolist()
            length = len(segments)
            sides = {"right": range(length - len(pads), length), "left": range(len(pads))}
            assert pads == list(sides[padding_side])
            assert (item["labels"][pads] == -100).all()
            for number in range(int(segments.max()) + 1):
                at = segments == number
                ids, labels = item["input_ids"][at].tolist(), item["labels"][at]
                assert item["position_ids"][at].tolist() == list(range(len(ids)))
                assert (
                    labels[labels != -100].tolist()
                    == item["input_ids"][at][labels != -100].tolist()
                )
                found.append((ids, (labels != -100).tolist()))
        wanted = [expected(shape, messages, tools) for messages, tools in chats]
        assert sorted(found) == sorted(wanted)
        assert (len(data) < len(chats)) == (batching == "packed")


def test_the_counts(tmp_path):
    """4 of 8 prompts are too long: cut on the right they have no targets, and are left out."""
    rows = [chat("x" * (60 if number % 2 else 3), "yes") for number in range(8)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    facts = prepared(tmp_path, source, truncation="truncate_right", batching="plain").facts
    assert facts["counts"]["conversations"] == 8
    assert (facts["counts"]["too_long"], facts["counts"]["without_targets"]) == (4, 4)
    assert (facts["num_sequences"], facts["targets"]) == (4, 4 * 4)
    facts = prepared(tmp_path, source, truncation="truncate_left", batching="plain").facts
    assert (facts["num_sequences"], facts["targets"]) == (8, 8 * 4)


def test_nothing_left_is_refused(tmp_path):
    """All rows too long: refused before training, with the counts and what to do."""
    source = write_jsonl(tmp_path / "a.jsonl", [chat("x" * 80, "yes")] * 3)
    with pytest.raises(DataError) as error:
        prepared(tmp_path, source)
    assert "dropped 3" in error.value.found
    assert "with targets" in error.value.expected
    assert error.value.where == str(source)
    assert "--seq_length" in error.value.action
    other = write_jsonl(tmp_path / "b.jsonl", [{"x": 1}])
    with pytest.raises(DataError) as error:
        prepared(tmp_path, other, on_bad_rows="skip")
    assert error.value.found.endswith("0 are held out (skipped for unknown format 1)")


def test_a_row_without_exact_targets_names_its_line(tmp_path):
    """The reason of the encoder is refused with file and line, or counted."""
    rows = [chat("a", "b"), {"messages": chat("a", "b")["messages"][:1]}]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError) as error:
        prepared(tmp_path, source)
    assert error.value.found.startswith("no assistant turn: ")
    assert error.value.where == f"{source}:2"
    data = prepared(tmp_path, source, on_bad_rows="skip")
    assert data.facts["skipped_rows"] == {"no assistant turn": 1}
    with pytest.raises(DataError):  # also from the cache that skipping filled
        prepared(tmp_path, source)


def test_held_out_conversations_are_whole_and_apart(tmp_path):
    """A tenth of 300 conversations is held out; no conversation is on both sides."""
    rows = [chat(f"{number:03d}", "yes") for number in range(300)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    data = prepared(tmp_path, source, eval_fraction=0.1, batching="plain")

    def numbers(part):
        items = part.__getitems__(list(range(len(part))))
        return {bytes(item["input_ids"][6:9].tolist()) for item in items}

    assert (data.facts["heldout_rule"], len(data.train) + len(data.heldout)) == ("documents", 300)
    assert 15 < len(data.heldout) < 50
    assert not numbers(data.train) & numbers(data.heldout)
    few = prepared(
        tmp_path, write_jsonl(tmp_path / "b.jsonl", rows[:9]), eval_fraction=0.1, batching="plain"
    )
    assert (len(few.train), len(few.heldout)) == (8, 1)


def test_a_mixture_keeps_its_shares(tmp_path):
    """6 rows at 0.6 and 2 at 0.4: an epoch of 10 holds the second source's rows twice each."""
    first = write_jsonl(tmp_path / "a.jsonl", [chat(f"a{n}", "yes") for n in range(6)])
    second = write_jsonl(tmp_path / "b.jsonl", [chat(f"b{n}", "yes") for n in range(2)])
    sources = {str(first): 0.6, str(second): 0.4}
    data = prepared(tmp_path, first, sources=sources, batching="plain").train
    names = [bytes(item["input_ids"][6:8].tolist()).decode() for item in data]
    assert sorted(names) == ["a0", "a1", "a2", "a3", "a4", "a5", "b0", "b0", "b1", "b1"]
    assert data.num_targets(np.arange(10)) == 40


@pytest.mark.parametrize("rewritten", ["a", "b"])
def test_a_source_rewritten_while_another_is_encoded_is_refused(tmp_path, rewritten):
    """The second before its turn and the first after it: named, and nothing is published."""
    rows = [chat(f"q{number}", "old") for number in range(30)]
    paths = {name: write_jsonl(tmp_path / f"{name}.jsonl", rows) for name in "ab"}
    sources = {str(path): 0.5 for path in paths.values()}
    calls = []

    def rewrites() -> bool:
        calls.append(1)
        if len(calls) == (31 if rewritten == "a" else 1):
            write_jsonl(paths[rewritten], [chat("q", "new answers")] * 30)
        return False

    with pytest.raises(DataError) as caught:
        prepared(tmp_path, "", sources=sources, should_stop=rewrites)
    error = caught.value
    assert error.found == "files that changed while they were read"
    assert "stays as it is during preparation" in error.expected
    assert error.where == str(paths[rewritten])
    assert "launch again" in error.action
    left = [path.name for path in (tmp_path / "cache" / "chats").iterdir()]
    assert [name for name in left if not name.startswith(".lock")] == []
    write_jsonl(paths[rewritten], rows)
    again = prepared(tmp_path, "", sources=sources)
    fresh = prepared(tmp_path, "", sources=sources, cache_dir=tmp_path / "other")
    assert again.facts == fresh.facts
    assert again.train.path.read_bytes() == fresh.train.path.read_bytes()


def test_the_cache_is_used_and_options_that_decide_make_another(tmp_path, capsys):
    """The same options read the cache; another template, length or policy prepares anew."""
    source = write_jsonl(tmp_path / "a.jsonl", [chat("a", "b")] * 4)
    prints = {prepared(tmp_path, source).facts["fingerprint"]}
    assert "preparing" in capsys.readouterr().err
    prints.add(prepared(tmp_path, source).facts["fingerprint"])
    assert "preparing" not in capsys.readouterr().err
    assert len(prints) == 1
    for changed in ({"seq_length": 50}, {"loss_on": "all"}, {"batching": "grouped"}):
        prints.add(prepared(tmp_path, source, **changed).facts["fingerprint"])
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(source.read_bytes())
    prints.add(prepared(tmp_path, moved).facts["fingerprint"])
    assert len(prints) == 4


def test_the_tokenizer_kept_has_the_template_that_was_used(tmp_path):
    """Loaded from the cache, the tokenizer renders the same text."""
    from transformers import AutoTokenizer

    shape = BY_NAME["phi"]
    source = write_jsonl(tmp_path / "a.jsonl", [chat("a", "b")] * 2)
    data = prepared(tmp_path, source, shape)
    loaded = AutoTokenizer.from_pretrained(data.tokenizer_dir)
    assert loaded.chat_template == shape.template
    assert json.loads((data.tokenizer_dir.parent / "manifest.json").read_text())["schema"] == 1
