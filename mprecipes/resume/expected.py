# SPDX-License-Identifier: Apache-2.0
"""Which batches are due after a checkpoint, read along another way than the training's loader."""

from dataclasses import replace
from typing import Any

from mprecipes.checkpoint.manifest import Manifest
from mprecipes.compute.numerics import batch_digest
from mprecipes.compute.ranks import BatchPlan, Ranks
from mprecipes.data.order import SampleOrder, micro_batches


def expected_digests(
    data: Any, order: SampleOrder, plan: BatchPlan, manifest: Manifest, ranks: Ranks, count: int
) -> list[str]:
    """Collective: gives the batch digests of the `count` steps after a checkpoint.

    Position, seed and number of rows are the manifest's, the rows are today's; without the
    training's iterator, position or workers. Blocks for reading `count` global batches.

    Args:
        order: as the training uses it; what the manifest does not know of it is kept.
    """
    stored = manifest.data or {}
    rows = stored.get("num_sequences", order.num_sequences)
    if rows != len(data):
        return []
    due = replace(order, seed=stored.get("seed", order.seed), num_sequences=rows)
    read = micro_batches(data, due, plan, start=manifest.samples_seen)
    mine = [
        sum(int(batch_digest(next(read).tensors).item()) for _ in range(plan.accumulation))
        for _ in range(count)
    ]
    read.close()
    return [f"{sum(each) % (1 << 64):016x}" for each in zip(*ranks.gather(mine))]
