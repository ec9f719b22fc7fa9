# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of digests; of whole states, tests/unit/checkpoint/test_digests.py."""

import pytest
import torch

from mprecipes.compute import digest
from mprecipes.compute.digest import sum_digest


@pytest.mark.parametrize("size", [3, 5000, 400_000])
def test_without_an_integer_product_the_number_is_the_same(monkeypatch, size):
    """Where no exact product of bytes exists it is computed in float32: the same bits."""
    values = torch.randint(-128, 128, (size,), generator=torch.Generator().manual_seed(1))
    values = values.to(torch.int8)
    expected = sum_digest([(values, "w", 0)])
    monkeypatch.setattr(digest, "_integer_product_is_exact", lambda: False)
    assert sum_digest([(values, "w", 0)]) == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sum_digest([(values, "w", 0)]) == expected


def test_the_largest_sums_are_exact():
    """A row of extreme bytes stays below 2^24, which float32 holds."""
    matrix, _ = digest._factors(torch.device("cpu"))
    assert matrix.abs().max() <= 63 and (matrix % 2 != 0).all()
    assert 128 * matrix.long().abs().sum(dim=0).max() < 1 << 24
    assert len({tuple(row.tolist()) for row in matrix}) == digest.ROW
