# SPDX-License-Identifier: Apache-2.0
"""Conversations into rows of a fixed length: what is too long is cut by a policy, the rest packed.

Nothing is lost but what the policy says, and that is counted. Packing is best-fit decreasing: the
longest first, each into the fullest row that still has room; the same lengths give the same rows.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

TRUNCATION = ("drop", "truncate_left", "truncate_right", "split")


@dataclass(frozen=True)
class Piece:
    """Tokens that are attended to together: a conversation, or what a policy left of it.

    Attributes:
        targets: which of `ids` are targets; never the first, which nothing predicts.
    """

    ids: np.ndarray
    targets: np.ndarray


def fit(
    ids: np.ndarray, targets: np.ndarray, limit: int, policy: str, counts: Counter[str]
) -> Iterator[Piece]:
    """Gives the pieces of one conversation, each of at most `limit` tokens and with a target.

    Args:
        policy: of TRUNCATION: leave a longer conversation out, keep its last or its first `limit`
            tokens, or cut it into pieces.
        counts: gets `too_long`, `dropped`, `cut_tokens` and `without_targets` (pieces left out).
    """
    too_long = len(ids) > limit
    counts["too_long"] += too_long
    if too_long and policy == "drop":
        counts["dropped"] += 1
        counts["cut_tokens"] += len(ids)
        return
    if policy == "split":
        spans = [(begin, begin + limit) for begin in range(0, len(ids), limit)]
    else:
        begin = max(0, len(ids) - limit) if policy == "truncate_left" else 0
        spans = [(begin, begin + limit)]
        counts["cut_tokens"] += max(0, len(ids) - limit)
    for begin, end in spans:
        kept = targets[begin:end].copy()
        kept[:1] = False
        if kept.any():
            yield Piece(ids[begin:end], kept)
        else:
            counts["without_targets"] += 1
            counts["cut_tokens"] += len(kept)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Gives rows of piece numbers, each of at most `capacity` tokens; every piece is in one row."""
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room that is left
    has_open = 0  # bit r: some row has exactly r tokens of room
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    for number in order.tolist():
        need = int(lengths[number])
        assert 0 < need <= capacity, (number, need)
        fitting = has_open >> need
        if fitting:
            room = need + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                has_open &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(number)
        if room > need:
            open_rows[room - need].append(row)
            has_open |= 1 << (room - need)
    return [sorted(row) for row in rows]
