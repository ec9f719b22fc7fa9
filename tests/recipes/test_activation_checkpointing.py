# SPDX-License-Identifier: Apache-2.0
"""Activations that are recomputed come out as they were: same autocast, same random numbers."""

import json

import pytest

from tests.fix64 import options, write_rows
from tests.inprocess import train
from tests.reading import journal


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_losses_and_gradients_are_bit_equal_with_and_without(rows, tmp_path, precision):
    """Four steps with dropout: losses and gradient norms of both ways are the same bits."""
    found = []
    for recompute in ("false", "true"):
        run = tmp_path / recompute
        words = options(
            rows, run, precision=precision, max_steps=4, gradient_checkpointing=recompute,
            numerics=json.dumps({"numerics_steps": None}),
        )  # fmt: skip
        assert train([*words, "--allow_unvalidated_fp8"]).error is None
        lines = journal(run).values()
        found.append([(line["loss"].hex(), line["grad_norm"].hex()) for line in lines])
    assert found[0] == found[1] and len(found[0]) == 4
