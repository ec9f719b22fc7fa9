# SPDX-License-Identifier: Apache-2.0
"""NaN and infinity are found by name, also in fragments; see also `test_snapshot.py`."""

import torch

from mprecipes.checkpoint.finite import not_finite


def test_fragments_are_looked_at_like_whole_tensors():
    """Neighbours in memory are summed at once; the one that is wrong is named all the same."""
    memory = torch.zeros(8)
    tensors = {"a[0:4 of 8]": memory[:4], "a[4:8 of 8]": memory[4:], "b": torch.ones(2)}
    assert not_finite(tensors) == []
    memory[5] = float("inf")
    assert not_finite(tensors) == ["a[4:8 of 8]"]
