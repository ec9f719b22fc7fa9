# SPDX-License-Identifier: Apache-2.0
"""One pass over a corpus: documents to ids, ids to rows in a file, held-out ones beside them."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mprecipes.data.cache import stop_if_asked
from mprecipes.data.corpus import Corpus
from mprecipes.data.keyed import numbered_keys
from mprecipes.data.tokens import TextTokenizer
from mprecipes.errors import DataError

MIN_HELDOUT_DOCUMENTS = 20
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 1024, 4 << 20
_HELDOUT_SEED = 0x68656C64


def pack_documents(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    folder: Path,
    *,
    seq_length: int,
    eval_fraction: float | None,
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """Writes `train.bin`, and `heldout.bin` for held-out documents; blocks, with progress.

    Gives the counts: `num_documents`, `skipped_rows`, `dropped_tokens`, `heldout_rule` (`none`,
    `documents` or `last_rows`), and under `train` and `heldout` `file`, `first_row`, `num_rows`.

    Raises:
        DataError: a bad row, a source that changed since it was opened, or too little text for one
            row.
        Preempted: `should_stop` said so.
    """
    corpus.require_unchanged()
    num_documents = sum(1 for _ in corpus) if eval_fraction else None
    rule = "none"
    if eval_fraction and num_documents is not None:
        by_document = eval_fraction * num_documents >= MIN_HELDOUT_DOCUMENTS
        rule = "documents" if by_document else "last_rows"
    writers = [_RowWriter(folder / "train.bin", seq_length, tokenizer.dtype)]
    if rule == "documents":
        writers.append(_RowWriter(folder / "heldout.bin", seq_length, tokenizer.dtype))
    seen = 0
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(progress(f"preparing {corpus.name}", num_documents))
        for writer in writers:
            stack.enter_context(contextlib.closing(writer))
        for texts in _batches(corpus):
            stop_if_asked(should_stop)
            documents = tokenizer.encode(texts)
            places = np.zeros(len(documents), dtype=bool)
            if rule == "documents":
                places = heldout_documents(seen, len(documents), eval_fraction or 0.0)
            for place, writer in enumerate(writers):
                writer.add([ids for ids, at in zip(documents, places) if at == place])
            seen += len(documents)
            report(len(documents), sum(map(len, documents)))
    corpus.require_unchanged()
    shares = [{"file": w.path.name, "first_row": 0, "num_rows": w.num_rows} for w in writers]
    if rule == "last_rows":
        shares = _split_last_rows(shares[0], eval_fraction or 0.0)
    for share in shares:
        _require_row(share, corpus, seq_length, seen, writers)
    return {
        "num_documents": seen,
        "skipped_rows": dict(sorted(corpus.skipped.items())),
        "dropped_tokens": sum(writer.num_pending for writer in writers),
        "heldout_rule": rule,
        "train": shares[0],
        "heldout": shares[1] if len(shares) > 1 else None,
    }


def heldout_documents(first: int, count: int, fraction: float) -> np.ndarray:
    """Says for the documents `first` .. `first + count - 1` which are held out (bool)."""
    keys = numbered_keys(_HELDOUT_SEED, np.arange(first, first + count, dtype=np.uint64))
    return keys < np.uint64(int(fraction * 2**64))


def _split_last_rows(share: dict[str, Any], fraction: float) -> list[dict[str, Any]]:
    num_heldout = max(1, round(fraction * share["num_rows"]))
    num_train = share["num_rows"] - num_heldout
    train = {**share, "num_rows": max(0, num_train)}
    return [train, {**share, "first_row": num_train, "num_rows": num_heldout}]


def _require_row(
    share: dict[str, Any],
    corpus: Corpus,
    seq_length: int,
    num_documents: int,
    writers: list["_RowWriter"],
) -> None:
    if share["num_rows"] > 0:
        return
    num_tokens = sum(w.num_rows * seq_length + w.num_pending for w in writers)
    raise DataError(
        f"{num_tokens} tokens in {num_documents} documents, too few for a row of {share['file']}",
        expected=f"at least {seq_length} tokens for every part of the data",
        where=corpus.name,
        action="give more text, a smaller --seq_length or another --eval_fraction",
    )


class _RowWriter:
    """Appends ids to a file in whole rows; what fills none is pending, and dropped at the end."""

    def __init__(self, path: Path, seq_length: int, dtype: np.dtype) -> None:
        self.path, self.seq_length = path, seq_length
        self.num_rows = 0
        self._pending = np.empty(0, dtype=dtype)
        self._file = path.open("wb")

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def add(self, documents: list[np.ndarray]) -> None:
        stream = np.concatenate([self._pending, *documents])
        num_rows = len(stream) // self.seq_length
        self._file.write(stream[: num_rows * self.seq_length].data)
        self._pending = stream[num_rows * self.seq_length :]
        self.num_rows += num_rows

    def close(self) -> None:
        self._file.close()


def _batches(corpus: Corpus) -> Iterator[list[str]]:
    texts: list[str] = []
    num_characters = 0
    for document in corpus:
        texts.append(document.text)
        num_characters += len(document.text)
        if len(texts) == _BATCH_DOCUMENTS or num_characters >= _BATCH_CHARACTERS:
            yield texts
            texts, num_characters = [], 0
    if texts:
        yield texts


@contextlib.contextmanager
def progress(what: str, num_documents: int | None) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to report (documents, tokens) to: a bar on a terminal, else two lines."""
    started, totals = time.monotonic(), [0, 0]

    def count(documents: int, tokens: int) -> None:
        totals[0] += documents
        totals[1] += tokens

    if sys.stderr.isatty():
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]:,} tokens"))
        with Progress(
            TextColumn("{task.description}"),
            *columns,
            TimeElapsedColumn(),
            console=Console(stderr=True),
        ) as bar:
            task = bar.add_task(what, total=num_documents, tokens=0)

            def advance(documents: int, tokens: int) -> None:
                count(documents, tokens)
                bar.update(task, advance=documents, tokens=totals[1])

            yield advance
        return
    print(f"{what} ...", file=sys.stderr, flush=True)
    yield count
    seconds = time.monotonic() - started
    done = f"{totals[0]:,} documents, {totals[1]:,} tokens in {seconds:.1f} s"
    print(f"{what}: {done}", file=sys.stderr, flush=True)
