# SPDX-License-Identifier: Apache-2.0
"""Text, tokenised and packed once into rows of equal length, in a memory-mapped cache.

The documents of a source, each followed by the EOS, form one stream; row i is its tokens `[i *
seq_length, (i + 1) * seq_length)`. The last partial row is dropped and counted, nothing else is.

On disk: `<cache>/packed/<fingerprint>/` with `train.bin` (and `heldout.bin`), the ids as native
uint16 (below 65536 ids) or uint32, and `tokenizer/`; see `cache` for the manifest. The fingerprint
covers the content of source and tokenizer, row length, EOS, held-out rule and format; no path,
name or time.

Held-out text is `eval_source` if there is one; else `eval_fraction` of the documents, by a keyed
hash of their number, when that expects 20 of them or more; else the last rows, the first of which
may begin inside a document whose start is trained on. A tokenizer trained here sees all documents
of the source.
"""

import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mprecipes.compute.ranks import Ranks
from mprecipes.data.cache import (
    building,
    default_cache_dir,
    fingerprint_of,
    locked,
    on_main,
    open_entry,
    stop_if_asked,
)
from mprecipes.data.corpus import Corpus, open_corpus
from mprecipes.data.encoding import pack_documents
from mprecipes.data.packed import PackedData
from mprecipes.data.tokens import BYTES, TextTokenizer, load_tokenizer, train_tokenizer
from mprecipes.errors import ConfigError, DataError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class PreparedData:
    """What a recipe trains and evaluates on.

    Attributes:
        tokenizer_dir: a folder `AutoTokenizer.from_pretrained` loads, also for bytes.
        facts: what the manifest records; `fingerprint` stands for the training rows alone.
    """

    train: PackedData
    heldout: PackedData | None
    tokenizer_dir: Path
    vocab_size: int
    eos_id: int
    facts: dict[str, Any]


def prepare_data(
    *,
    source: str,
    text_field: str = "text",
    on_bad_rows: str = "refuse",
    tokenizer: str = BYTES,
    train_tokenizer_vocab: int | None = None,
    seq_length: int,
    eval_source: str | None = None,
    eval_fraction: float | None = None,
    ranks: Ranks,
    cache_dir: Path | None = None,
    should_stop: Callable[[], bool] | None = None,
    wait_seconds: float = 7200,
    verify: bool = False,
) -> PreparedData:
    """Collective: gives the packed data, prepared by rank 0 if the cache does not hold it.

    Blocks until it is there. All ranks read the same cache folder; with `on_each_node` those of a
    node, whose first rank prepares it.

    Args:
        should_stop: asked between batches of documents on rank 0.
        wait_seconds: how long other ranks wait for rank 0, and rank 0 for another launch.
        verify: check the SHA-256 of a cached entry, not only sizes and times.

    Raises:
        ConfigError: the options contradict each other.
        DataError: a source is malformed, missing, too small or changed meanwhile, or the wait was
            too long.
        Preempted: `should_stop` said so.
    """
    _check_options(tokenizer, train_tokenizer_vocab, seq_length, eval_fraction)
    cache, ended = cache_dir or default_cache_dir(), threading.Event()
    digests = cache / "digests.json"
    builder = _Builder(
        folder=cache / "packed",
        seq_length=seq_length,
        wait_seconds=wait_seconds,
        should_stop=lambda: ended.is_set() or (should_stop is not None and should_stop()),
        verify=verify,
    )

    def work() -> tuple[Path, Path | None, dict[str, Any]]:
        options: dict[str, Any] = {
            "text_field": text_field,
            "on_bad_rows": on_bad_rows,
            "digest_cache": digests,
        }
        corpus = open_corpus(source, **options)
        evaluation = open_corpus(eval_source, **options) if eval_source else None
        given = None if train_tokenizer_vocab else load_tokenizer(tokenizer)
        fraction = None if eval_source else eval_fraction
        train = builder.entry(corpus, given, vocab=train_tokenizer_vocab, eval_fraction=fraction)
        names = {"source": corpus.name, "source_kind": corpus.kind, "text_field": text_field}
        names["tokenizer"] = f"trained-{train_tokenizer_vocab}" if given is None else tokenizer
        if evaluation is None:
            return train, None, names
        names["eval_source"] = evaluation.name
        same = load_tokenizer(str(train / "tokenizer")) if given is None else given
        return train, builder.entry(evaluation, same), names

    train, heldout, names = on_main(ranks, work, wait_seconds, ended)
    return agree(ranks, lambda: _open(train, heldout, names), cache)


def _check_options(
    tokenizer: str, vocab: int | None, seq_length: int, eval_fraction: float | None
) -> None:
    if seq_length < 2:
        raise ConfigError(
            f"seq_length {seq_length}",
            expected="2 or more: one token and the target behind it",
            where="seq_length",
            action="set --seq_length 2 or more",
        )
    if eval_fraction is not None and not 0 < eval_fraction < 1:
        raise ConfigError(
            f"eval_fraction {eval_fraction}",
            expected="a number between 0 and 1, or none",
            where="eval_fraction",
            action="set --eval_fraction 0.05, or --eval_fraction none for no held-out text",
        )
    if vocab is not None and tokenizer != BYTES:
        raise ConfigError(
            f"train_tokenizer_vocab {vocab} together with the tokenizer {tokenizer}",
            expected="a tokenizer to load or one to train, not both",
            where="train_tokenizer_vocab",
            action=f"set --train_tokenizer_vocab none, or --tokenizer {BYTES}",
        )


@dataclass(frozen=True)
class _Builder:
    """Finds or builds cache entries; rank 0 only."""

    folder: Path
    seq_length: int
    wait_seconds: float
    should_stop: Callable[[], bool]
    verify: bool

    def entry(
        self,
        corpus: Corpus,
        tokenizer: TextTokenizer | None,
        *,
        vocab: int | None = None,
        eval_fraction: float | None = None,
    ) -> Path:
        recipe = {
            "format": FORMAT_VERSION,
            "content_digest": corpus.content_digest,
            "text_field": corpus.text_field,
            "seq_length": self.seq_length,
            "eval_fraction": eval_fraction,
        }
        identity = tokenizer.digest if tokenizer else f"train {vocab}"
        entry = self.folder / fingerprint_of({**recipe, "tokenizer": identity})[:32]
        with locked(entry, wait_seconds=self.wait_seconds, should_stop=self.should_stop):
            if entry.exists() and self._is_usable(entry, corpus):
                return entry
            corpus.require_unchanged()  # the wait for the lock may have been long
            facts: dict[str, Any] = {}
            with building(entry, facts) as folder:
                if tokenizer is None:
                    assert vocab is not None
                    tokenizer = train_tokenizer(self._texts(corpus), vocab)
                tokenizer.save(folder / "tokenizer")
                packed = pack_documents(
                    corpus,
                    tokenizer,
                    folder,
                    seq_length=self.seq_length,
                    eval_fraction=eval_fraction,
                    should_stop=self.should_stop,
                )
                facts |= recipe | packed
                facts |= {
                    "tokenizer_digest": tokenizer.digest,
                    "vocab_size": tokenizer.vocab_size,
                    "eos_id": tokenizer.eos_id,
                    "dtype": tokenizer.dtype.name,
                }
                of = ("tokenizer_digest", "vocab_size", "eos_id", *recipe)
                facts["fingerprint"] = fingerprint_of({key: facts[key] for key in of})
        return entry

    def _texts(self, corpus: Corpus) -> Iterator[str]:
        for document in corpus:
            stop_if_asked(self.should_stop)
            yield document.text

    def _is_usable(self, entry: Path, corpus: Corpus) -> bool:
        try:
            facts = open_entry(entry, verify=self.verify)
        except DataError as damage:
            print(f"preparing {corpus.name} anew: {damage.where}: {damage.found}", file=sys.stderr)
            shutil.rmtree(entry)
            return False
        if facts["skipped_rows"] and corpus.on_bad_rows == "refuse":
            for _ in corpus:  # raises at the first row that an earlier launch was allowed to skip
                pass
        return True


def agree(ranks: Ranks, open_it: Callable[[], PreparedData], cache: Path) -> PreparedData:
    """Collective: gives what `open_it` gives; where it fails on one rank, every rank raises.

    Raises:
        DataError: it failed, or ranks opened other data than rank 0.
    """
    prepared, problem = None, None
    try:
        prepared = open_it()
    except DataError as error:
        problem = f"rank {ranks.rank}: {error.where}: {error.found}"
    answers = ranks.gather((problem, prepared.facts["fingerprint"] if prepared else None))
    problems = [problem for problem, _ in answers if problem]
    if not problems:
        problems = [
            f"rank {rank}: data {fingerprint}, those of rank 0 are {answers[0][1]}"
            for rank, (_, fingerprint) in enumerate(answers)
            if fingerprint != answers[0][1]
        ]
    if prepared is None or problems:
        raise DataError(
            "; ".join(problems),
            expected="the same prepared data, seen by every rank",
            where=str(cache),
            action="set MPRECIPES_CACHE to a folder that all machines share; with `on_each_node` "
            "each node prepares its own, from the same source files",
        )
    return prepared


def _open(train: Path, heldout: Path | None, names: dict[str, Any]) -> PreparedData:
    facts = open_entry(train)
    parts = {"train": _packed(train, facts, "train"), "heldout": _packed(train, facts, "heldout")}
    told = {key: facts[key] for key in facts if key not in ("train", "heldout", "format")}
    told |= {**names, "num_sequences": len(parts["train"] or ())}
    told["tokens"] = told["num_sequences"] * facts["seq_length"]
    if heldout is not None:
        other = open_entry(heldout)
        parts["heldout"] = _packed(heldout, other, "train")
        told |= {"heldout_rule": "source", "heldout_fingerprint": other["fingerprint"]}
        told["heldout_skipped_rows"] = other["skipped_rows"]
    told["heldout_sequences"] = len(parts["heldout"] or ())
    assert parts["train"] is not None
    return PreparedData(
        train=parts["train"],
        heldout=parts["heldout"],
        tokenizer_dir=train / "tokenizer",
        vocab_size=facts["vocab_size"],
        eos_id=facts["eos_id"],
        facts=told,
    )


def _packed(entry: Path, facts: dict[str, Any], part: str) -> PackedData | None:
    share = facts[part]
    if share is None:
        return None
    path, rows = entry / share["file"], {k: share[k] for k in ("first_row", "num_rows")}
    return PackedData(path, seq_length=facts["seq_length"], dtype=facts["dtype"], **rows)
