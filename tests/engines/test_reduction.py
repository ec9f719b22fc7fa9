# SPDX-License-Identifier: Apache-2.0
"""`reduce_dtype` over two processes: what is sent, what comes out, and on which engine."""

import json

import pytest
import torch

from mprecipes import read_metrics
from mprecipes.compute.precision import REDUCE_DTYPES
from tests.engines.reducing import COUNT, gradient_of
from tests.launching import launch
from tests.reading import journal, manifest

pytestmark = pytest.mark.launch


def test_ddp_sums_in_what_was_asked_and_sends_half(tmp_path):
    """Bit for bit the sum of halves in each dtype; FP32 gradients; 4096 bytes, or 2048."""
    out = tmp_path / "found.json"
    done = launch("tests/engines/reducing.py", [out], num_processes=2)
    assert done.returncode == 0, done.output
    found = json.loads(out.read_text())
    for wanted, values in found.items():
        dtype = getattr(torch, REDUCE_DTYPES[wanted])
        right = (gradient_of(0).to(dtype) / 2 + gradient_of(1).to(dtype) / 2).float()
        assert values["gradient"] == right.tolist() and values["dtype"] == "torch.float32"
        assert values["bytes"] == COUNT * dtype.itemsize
    assert len({tuple(values["gradient"]) for values in found.values()}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["cpu", "fsdp2", "zero1", "zero2", "zero3"])
def test_every_engine_sums_in_bf16_when_asked(train, tmp_path, engine, precision):
    """Read back from the engine, in the manifest; other losses than in FP32, and close to them."""
    losses, sent = [], []
    for wanted in ("fp32", "bf16"):
        run = tmp_path / wanted
        numerics = json.dumps({"reduce_dtype": wanted})
        done = train(run, engine, 2, precision=precision, numerics=numerics)
        assert done.returncode == 0, done.output
        facts = manifest(run, 10)
        assert facts["precision"]["reduce_dtype"] == REDUCE_DTYPES[wanted]
        if engine != "cpu":
            assert facts["topology"]["read_back"]["reduce_dtype"] == REDUCE_DTYPES[wanted]
        losses.append([line["loss"] for line in journal(run).values()])
        lines, _ = read_metrics(run / "metrics.jsonl")
        sent += [v for line in lines for n, v in line.items() if n == "perf/communicated_bytes"]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert sent[1] < sent[0]
