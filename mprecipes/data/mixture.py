# SPDX-License-Identifier: Apache-2.0
"""Several sources in fixed shares, as one list of rows: exact in every epoch, and resumable.

An epoch is long enough to hold every row of every source at least once, and each source has its
share of the rows of an epoch to within one row; the smaller ones come round again. The shuffle of
`SampleOrder` over the list mixes them.
"""

from collections.abc import Sequence

import numpy as np


def mixed_rows(sizes: Sequence[int], shares: Sequence[float]) -> list[np.ndarray]:
    """Gives for each source the numbers of its rows in an epoch, in order.

    Args:
        sizes: rows of each source, at least 1.
        shares: of each source; they add up to 1.
    """
    num_rows = max(int(np.ceil(size / share - 1e-9)) for size, share in zip(sizes, shares))
    exact = [num_rows * share for share in shares]
    counts = [max(size, int(count)) for size, count in zip(sizes, exact)]
    by_rest = sorted(range(len(sizes)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_rest[: max(0, num_rows - sum(counts))]:
        counts[index] += 1
    return [np.arange(count, dtype=np.int64) % size for count, size in zip(counts, sizes)]
