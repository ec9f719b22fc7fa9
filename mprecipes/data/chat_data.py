# SPDX-License-Identifier: Apache-2.0
"""Conversations, encoded, cut and packed once, in the same memory-mapped cache as packed text.

On disk: `<cache>/chats/<fingerprint>/` with the files of `chat_rows` for `train` and `heldout`,
`train.index` (the rows of an epoch of a mixture) and `tokenizer/`, whose chat template is the one
used. The fingerprint covers sources, shares, tokenizer, template and all options; no path, name or
time. Held-out conversations are whole ones, by the rule of packed text. While it is prepared, the
encoded data is in memory.
"""

import dataclasses
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

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
from mprecipes.data.chat import ChatEncoder, find_template
from mprecipes.data.chat_options import ChatOptions
from mprecipes.data.chat_rows import ChatRows, write_rows
from mprecipes.data.conversations import Conversations, open_conversations
from mprecipes.data.docstrings import DOCSTRINGS
from mprecipes.data.encoding import MIN_HELDOUT_DOCUMENTS, heldout_documents, progress
from mprecipes.data.fitting import Piece, fit, pack
from mprecipes.data.mixture import mixed_rows
from mprecipes.data.packing import PreparedData, agree
from mprecipes.data.rows import BadRow
from mprecipes.data.tokens import TextTokenizer
from mprecipes.errors import DataError

FORMAT_VERSION = 2


@dataclass
class _Part:
    """The pieces and rows of one part, over all sources."""

    pieces: list[Piece] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, conversations: list[list[Piece]], seq_length: int, packed: bool) -> None:
        """Adds what one source gives as rows of its own."""
        first = len(self.pieces)
        pieces = [piece for conversation in conversations for piece in conversation]
        rows = [[number] for number in range(len(pieces))]
        if packed:
            rows = pack([len(piece.ids) for piece in pieces], seq_length)
        self.pieces += pieces
        self.rows += [[first + number for number in row] for row in rows]
        self.sizes.append(len(rows))


def prepare_chats(
    *,
    sources: dict[str, float],
    options: ChatOptions,
    tokenizer: TextTokenizer,
    seq_length: int,
    eval_fraction: float | None,
    ranks: Ranks,
    cache_dir: Path | None = None,
    should_stop: Callable[[], bool] | None = None,
    wait_seconds: float = 7200,
) -> PreparedData:
    """Collective: gives rows of conversations, prepared by rank 0 if the cache does not hold them.

    Args:
        sources: share of each source in the rows of an epoch; they add up to 1.
        seq_length: tokens of a row, and the most a conversation may have.
        eval_fraction: share of each source's conversations that is held out; None is none.

    Raises:
        DataError: a source is malformed, missing or changed meanwhile, or nothing of it is left to
            train on.
        Preempted: `should_stop` said so.
    """
    cache, ended = cache_dir or default_cache_dir(), threading.Event()

    def asked() -> bool:
        return ended.is_set() or (should_stop is not None and should_stop())

    def work() -> Path:
        template = find_template(tokenizer, options.template)
        encoder = ChatEncoder(
            tokenizer, template, loss_on=options.loss_on, values=options.template_values
        )
        chosen = {"format": options.format, "on_bad_rows": options.on_bad_rows}
        digests = cache / "digests.json"
        opened = [open_conversations(each, **chosen, digest_cache=digests) for each in sources]
        decides = {
            "format": FORMAT_VERSION,
            "sources": [[each.name == DOCSTRINGS, each.content_digest] for each in opened],
            "shares": list(sources.values()),
            "encoder": encoder.digest,
            "seq_length": seq_length,
            "eval_fraction": eval_fraction,
            "options": {name: getattr(options, name) for name in _DECIDE},
        }
        entry = cache / "chats" / fingerprint_of(decides)[:32]
        with locked(entry, wait_seconds=wait_seconds, should_stop=asked):
            if entry.exists() and _is_usable(entry, options):
                return entry
            facts: dict[str, Any] = {}
            with building(entry, facts) as folder:
                tokenizer.hf.chat_template = template
                tokenizer.save(folder / "tokenizer")
                facts |= _write(
                    folder, opened, list(sources.values()), encoder, options.truncation,
                    options.batching == "packed", seq_length, eval_fraction, asked,
                )  # fmt: skip
                facts |= {
                    "fingerprint": fingerprint_of(decides),
                    "content_digests": [each.content_digest for each in opened],
                    "encoder_digest": encoder.digest,
                    "tokenizer_digest": tokenizer.digest,
                    "vocab_size": tokenizer.vocab_size,
                    "eos_id": tokenizer.eos_id,
                    "dtype": tokenizer.dtype.name,
                    "seq_length": seq_length,
                }
        return entry

    entry = on_main(ranks, work, wait_seconds, ended)
    source = ", ".join(sources)
    names: dict[str, Any] = {"source": source, "tokenizer": tokenizer.name}
    names["chat"] = dataclasses.asdict(options)
    pad_id = tokenizer.hf.pad_token_id
    pad_id = tokenizer.eos_id if pad_id is None else pad_id
    return agree(ranks, lambda: _open(entry, options, pad_id, names), cache)


_DECIDE = ("format", "truncation", "batching", "padding_side")


def _write(
    folder: Path,
    opened: list[Conversations],
    shares: list[float],
    encoder: ChatEncoder,
    truncation: str,
    packed: bool,
    seq_length: int,
    eval_fraction: float | None,
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """Writes both parts; gives the counts."""
    train, heldout = _Part(), _Part()
    counts: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    rule = "none"
    for source in opened:
        source.corpus.require_unchanged()
        conversations = _encoded(source, encoder, truncation, seq_length, counts, should_stop)
        source.corpus.require_unchanged()
        skipped += source.skipped
        held, rule = _held_out(len(conversations), eval_fraction)
        kept = [pieces for pieces, is_held in zip(conversations, held) if not is_held]
        out = [pieces for pieces, is_held in zip(conversations, held) if is_held]
        if not any(kept) or (eval_fraction and not any(out)):
            raise DataError(
                f"{len(conversations)} conversations, of which {sum(map(bool, kept))} are left to "
                f"train on and {sum(map(bool, out))} are held out ({_told(counts, skipped)})",
                expected="at least one conversation with targets for every part of the data",
                where=source.name,
                action="give more rows, a larger --seq_length, another chat: {truncation: ...} or "
                "--eval_fraction none",
            )
        train.add(kept, seq_length, packed)
        heldout.add(out, seq_length, packed)
    write_rows(folder, "train", train.pieces, train.rows)
    if heldout.rows:
        write_rows(folder, "heldout", heldout.pieces, heldout.rows)
    offsets = np.cumsum([0, *train.sizes[:-1]])
    numbers = [rows + begin for rows, begin in zip(mixed_rows(train.sizes, shares), offsets)]
    np.concatenate(numbers).astype(np.int64).tofile(folder / "train.index")
    for source in opened:
        source.corpus.require_unchanged()
    return {
        "num_conversations": counts["conversations"],
        "skipped_rows": dict(sorted(skipped.items())),
        "counts": dict(sorted(counts.items())),
        "stored_rows": len(train.rows),
        "stored_tokens": sum(len(piece.ids) for piece in train.pieces),
        "stored_targets": sum(int(piece.targets.sum()) for piece in train.pieces),
        "heldout_rule": rule,
        "heldout_targets": sum(int(piece.targets.sum()) for piece in heldout.pieces),
        "has_heldout": bool(heldout.rows),
    }


def _encoded(
    source: Conversations,
    encoder: ChatEncoder,
    truncation: str,
    seq_length: int,
    counts: Counter[str],
    should_stop: Callable[[], bool],
) -> list[list[Piece]]:
    """Gives the pieces of every conversation of a source; none where nothing of it is left."""
    found: list[list[Piece]] = []
    with progress(f"preparing {source.name}", None) as report:
        for conversation in source:
            stop_if_asked(should_stop)
            try:
                encoded = encoder(conversation)
            except BadRow as bad:
                source.refuse(bad, conversation.where)
                continue
            counts["conversations"] += 1
            counts["unended_turns"] += encoded.num_unended
            found.append([*fit(encoded.ids, encoded.targets, seq_length, truncation, counts)])
            report(1, len(encoded.ids))
    return found


def _held_out(count: int, fraction: float | None) -> tuple[np.ndarray, str]:
    """Says which of `count` conversations are held out (bool), and by which rule."""
    if not fraction:
        return np.zeros(count, dtype=bool), "none"
    if fraction * count >= MIN_HELDOUT_DOCUMENTS:
        return heldout_documents(0, count, fraction), "documents"
    return np.arange(count) >= count - max(1, round(fraction * count)), "last_rows"


def _told(counts: Counter[str], skipped: Counter[str]) -> str:
    named = {name.replace("_", " "): count for name, count in counts.items()}
    named |= {f"skipped for {reason}": count for reason, count in skipped.items()}
    return ", ".join(f"{name} {count}" for name, count in sorted(named.items()))


def _is_usable(entry: Path, options: ChatOptions) -> bool:
    try:
        facts = open_entry(entry)
    except DataError as damage:
        print(f"preparing anew: {damage.where}: {damage.found}", file=sys.stderr)
    else:
        if not facts["skipped_rows"] or options.on_bad_rows == "skip":
            return True  # else preparing again raises at the row that was skipped
    shutil.rmtree(entry)
    return False


def _open(entry: Path, options: ChatOptions, pad_id: int, names: dict[str, Any]) -> PreparedData:
    facts = open_entry(entry)
    layout = {
        "seq_length": facts["seq_length"],
        "dtype": facts["dtype"],
        "pad_id": pad_id,
        "pad_left": options.padding_side == "left",
        "packed": options.batching == "packed",
        "grouped": options.batching == "grouped",
    }
    index = np.fromfile(entry / "train.index", dtype=np.int64)
    train = ChatRows(entry, "train", index=index, **layout)
    heldout = ChatRows(entry, "heldout", **layout) if facts["has_heldout"] else None
    told = {key: value for key, value in facts.items() if key != "has_heldout"}
    told |= {**names, "num_sequences": len(train), "heldout_sequences": len(heldout or ())}
    told["tokens"] = int(train.lengths.sum())
    told["targets"] = train.num_targets(np.arange(len(train)))
    return PreparedData(
        train=train,
        heldout=heldout,
        tokenizer_dir=entry / "tokenizer",
        vocab_size=facts["vocab_size"],
        eos_id=facts["eos_id"],
        facts=told,
    )
