# SPDX-License-Identifier: Apache-2.0
"""Single updates on every engine: FP32 accumulation, one clipping, no update that is not finite.

Case F05 (1024 micro-batches of gradient 1, BF16 mode), case H03 (gradient (3, 4), SGD of rate 1).
"""

import json

import pytest

from tests.launching import launch

pytestmark = pytest.mark.launch
COVERING = [("zero1", "none"), ("zero2", "0.5"), ("zero3", "1.0"), ("fsdp2", "0.5")]
REST = [
    (engine, clipping)
    for engine in ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload")
    for clipping in ("none", "0.5", "1.0")
    if (engine, clipping) not in COVERING
]


FP16 = [("fsdp2", "none"), ("zero1", "0.5"), ("zero2", "none"), ("zero3", "1.0")]


def check(folder, engine, clipping, precision="bf16"):
    out = folder / "found.json"
    name = "cpu" if engine == "ddp" else engine
    config = f"accelerate_configs/{name}_{precision}.yaml"
    done = launch("tests/engines/probe.py", [out, clipping], config=config, num_processes=2)
    assert done.returncode == 0, done.output
    found = json.loads(out.read_text())
    limit = float("inf") if clipping == "none" else float(clipping)
    norm, moved = found["ones"]  # a BF16 sum of 1024 parts would stop at a quarter
    assert (norm, moved[1]) == (pytest.approx(1.0, abs=1e-5), 0.0)
    assert moved[0] == pytest.approx(min(1.0, limit), abs=1e-5)
    norm, moved = found["three_four"]
    assert norm == pytest.approx(5.0, abs=1e-4)
    assert sum(step**2 for step in moved) ** 0.5 == pytest.approx(min(5.0, limit), rel=1e-5)
    assert found["stale"] in ([[], []], [None, None])  # copies are casts of the masters; or none
    assert "not finite" in found["refused"] or "nan" in found["refused"]
    assert found["untouched"] is True
    assert found["topology"]["sharding"] == engine


@pytest.mark.parametrize(("engine", "clipping"), COVERING)
def test_sums_clips_and_refuses(tmp_path, engine, clipping):
    """Update norm 5, 0.5 or 1 in each engine: clipped once, by the recipe's number."""
    check(tmp_path, engine, clipping)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "clipping"), REST)
def test_the_other_pairs(tmp_path, engine, clipping):
    """Every other engine and clipping."""
    check(tmp_path, engine, clipping)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "clipping"), FP16)
def test_under_a_loss_scale(tmp_path, engine, clipping):
    """1024 gradients of 64 at scale 65536: their sum is more than FP16 holds, and gives 1.0."""
    check(tmp_path, engine, clipping, "fp16")
