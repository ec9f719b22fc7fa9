# SPDX-License-Identifier: Apache-2.0
"""The batches that are due after a checkpoint."""

from types import SimpleNamespace

import torch

from mprecipes.compute.numerics import batch_digest
from mprecipes.compute.ranks import BatchPlan, Ranks
from mprecipes.data.order import SampleOrder
from mprecipes.resume.expected import expected_digests
from tests.unit.resume.test_probe import ROWS, Rows


def digests(rows_by_step):
    data = Rows()
    found = []
    for rows in rows_by_step:
        items = [data[row] for row in rows]
        tensors = {
            name: torch.stack([item[name] for item in items]) for name in ("input_ids", "labels")
        }
        found.append(f"{int(batch_digest(tensors)) % (1 << 64):016x}")
    return found


def manifest(samples_seen=8, seed=3, rows=ROWS):
    data = {"seed": seed, "num_sequences": rows}
    return SimpleNamespace(samples_seen=samples_seen, data=data)


def test_they_follow_from_position_seed_and_rows_alone():
    """Two steps of eight samples in two micro-batches; today's order object may be wrong."""
    order = SampleOrder(ROWS, 3)
    wanted = digests([order(8, 8).tolist(), order(16, 8).tolist()])
    plan = BatchPlan(4, 2, 1, 0)
    wrong = SampleOrder(ROWS, 99)
    assert expected_digests(Rows(), wrong, plan, manifest(), Ranks(), 2) == wanted


def test_each_rank_reads_its_own_share():
    """Summed over two ranks it is the same."""
    order = SampleOrder(ROWS, 3)
    wanted = digests([order(8, 8).tolist()])
    shares = []

    class Each(Ranks):
        def gather(self, value):
            shares.append(value)
            return list(shares)

    for rank in (0, 1):
        found = expected_digests(
            Rows(), order, BatchPlan(4, 1, 2, rank), manifest(), Each(rank, 2), 1
        )
    assert found == wanted


def test_nothing_is_expected_of_data_of_another_length():
    """The contract has said so already."""
    plan = BatchPlan(4, 1, 1, 0)
    stored = manifest(rows=ROWS + 1)
    assert expected_digests(Rows(), SampleOrder(ROWS, 3), plan, stored, Ranks(), 2) == []
