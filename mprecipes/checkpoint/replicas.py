# SPDX-License-Identifier: Apache-2.0
"""Whether ranks that should hold the same state do: a different window of it at every save.

Each rank writes only its share of the replicated state, so a rank whose copy has drifted would go
unseen in the other shares. A window of at most 16 MiB is copied beside the share and its digests
are compared; it moves on with every save, so that a state of 1.8 GB has been compared in full after
110 saves. What makes replicas drift usually reaches all tensors at once. At a restore every rank's
whole state is compared, and during the training all weights, where a run asks for it.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping

import torch

from mprecipes.checkpoint.digests import digests_of_parts, kind_and_name, tensor_digest
from mprecipes.checkpoint.fragments import replicated
from mprecipes.compute.ranks import Ranks
from mprecipes.errors import NumericsError

WINDOW_BYTES = 16 << 20
MAX_NAMES = 5


class ReplicaWindow:
    """Reused memory for one window."""

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._bytes, self._memory = window_bytes, torch.empty(0, dtype=torch.uint8)
        self._parts: list[tuple[str, torch.Tensor, str, int]] = []

    def copy(self, live: Mapping[str, torch.Tensor], number: int) -> None:
        """Copies the window of save `number`; blocks. The next copy overwrites it.

        Args:
            live: what every rank holds.
        """
        total = sum(tensor.nbytes for tensor in live.values())
        size = min(self._bytes, total)
        if len(self._memory) < size:
            self._memory = torch.zeros(size, dtype=torch.uint8)
        self._parts, used = [], 0
        begin = number * self._bytes % total if total > self._bytes else 0
        for first, last in ((begin, begin + size), (begin - total, begin + size - total)):
            start = 0
            for full_name in sorted(live):
                nbytes = live[full_name].nbytes
                low, high = max(first - start, 0), min(last - start, nbytes)
                start += nbytes
                if low < high:
                    data = live[full_name].detach().reshape(-1).view(torch.uint8)[low:high]
                    copied = self._memory[used : used + high - low].copy_(data)
                    kind, name = kind_and_name(full_name)
                    self._parts.append((kind, copied, name, low))
                    used += high - low

    def digests(self) -> dict[str, str]:
        """Gives the digest of the window's part of each kind of state."""
        return digests_of_parts(self._parts)


def compare_weights(live: Mapping[str, torch.Tensor], ranks: Ranks, step: int) -> None:
    """Collective: refuses weights that are not the same bits on every rank that holds a copy.

    One pass over the weights and one small gather; a second pass, tensor by tensor, only where they
    differ. What some rank does not name, such as a shard that one rank alone holds, is left out.

    Args:
        live: as `snapshot.live_tensors` and `working_copies` name them.

    Raises:
        NumericsError: on every rank; it names the ranks that differ from most (of two: from rank
            0) and the first tensors they differ in.
    """
    if ranks.world_size == 1:
        return
    weights = {
        kind_and_name(key)[1]: tensor
        for key, tensor in replicated(live).items()
        if key.startswith(("weights/", "working/"))
    }
    answers = ranks.gather((_names_digest(weights), _digest(weights)))
    if len(set(answers)) == 1:
        return
    if len({names for names, _ in answers}) > 1:
        shared = set.intersection(*map(set, ranks.gather(list(weights))))
        weights = {name: weights[name] for name in weights if name in shared}
        answers = ranks.gather((_names_digest(weights), _digest(weights)))
    totals = [total for _, total in answers]
    if len(set(totals)) == 1:
        return
    most = Counter(totals).most_common(1)[0][0]  # of equally many the one of the lowest rank
    by_rank = ranks.gather([tensor_digest(tensor, name) for name, tensor in weights.items()])
    right = totals.index(most)
    found = []
    for rank, digests in enumerate(by_rank):
        pairs = zip(weights, digests, by_rank[right], strict=True)
        names = [name for name, ours, theirs in pairs if ours != theirs]
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        if names:
            found.append(f"rank {rank} differs in {', '.join(names[:MAX_NAMES])}{more}")
    raise NumericsError(
        f"replicas of the weights differ: {'; '.join(found)} (compared with rank {right})",
        expected="the same bits on every rank; no checkpoint of this state was published",
        where=f"step {step}",
        action="launch again to go back to the last good checkpoint; if the same rank is named "
        "again, take its machine out: suspect its memory, GPU or network",
    )


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    parts = (("weights", tensor, name, 0) for name, tensor in weights.items())
    return digests_of_parts(parts).get("weights", "")


def _names_digest(weights: Mapping[str, torch.Tensor]) -> str:
    return hashlib.sha256("\n".join(weights).encode()).hexdigest()
