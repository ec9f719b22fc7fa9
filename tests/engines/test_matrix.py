# SPDX-License-Identifier: Apache-2.0
"""Drills on every engine and precision: killed, launched again, bit-equal.

8 steps of 8 rows on two processes, four micro-batches a step over both, dropout on, a checkpoint
every 3 steps, killed at step 5. `make test` drills three pairs, `make test-full` the whole table.
"""

import itertools

import pytest

from mprecipes.tools.drill import run_drill
from tests.fix64 import RECIPE, ROOT, options, write_rows
from tests.reading import manifest

pytestmark = pytest.mark.launch
ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload")
CONFIGS = {"ddp": "cpu"}
COVERING = [("fsdp2", "bf16", "step"), ("zero2", "fp32", "save"), ("zero3", "bf16", "step")]
REST = [
    case
    for case in itertools.product(ENGINES, ("fp32", "bf16"), ("step", "save"))
    if case not in COVERING
]


def drill(folder, engine, precision, during):
    values = {"max_steps": 8, "save_steps": 3, "per_device_train_batch_size": 2}
    values |= {"global_batch_size": 8, "precision": precision}
    words = options(write_rows(folder / "rows.jsonl"), folder, **values)
    del words[words.index("--output_dir") :][:2]
    suffix = "" if precision == "fp32" else f"_{precision}"
    config = f"{CONFIGS.get(engine, engine)}{suffix}.yaml"
    return run_drill(
        RECIPE,
        folder / "drill",
        arguments=words,
        kill_at_steps=(5,),
        kill_during=during,
        num_processes=2,
        accelerate_config=ROOT / "accelerate_configs" / config,
        timeout=240.0,
    )


def check(folder, engine, precision, during):
    result = drill(folder, engine, precision, during)
    assert result.equal, [row for row in result.rows if not row.equal]
    last, replayed = {"step": (5, 2), "save": (6, 3)}[during]
    assert [(found.step, found.resumed_from) for found in result.kills] == [(last, 3)]
    counts = {row.what: row.compared for row in result.rows}
    assert (counts["loss"], counts["samples (batch digest)"]) == (8, 8)
    assert (counts["replayed steps"], counts["resume report"]) == (replayed, 1)
    # every element of the masters and moments once, and 20 step counters
    assert (counts["parameters"], counts["optimizer state"]) == (28864, 57748)
    found = manifest(folder / "drill/interrupted", 8)
    assert found["topology"]["sharding"] == engine
    assert found["topology"]["world_size"] == 2
    assert set(found["params"].values()) == {"float32"}
    assert found["shapes"]["model.embed_tokens.weight"] == [257, 32]
    assert {entry["rank"] for entry in found["files"]} == {0, 1}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """As every launch of the tests: the drill passes this environment on."""
    for name in ("MPRECIPES_CPU_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


@pytest.mark.parametrize(("engine", "precision", "during"), COVERING)
def test_covering_drills(tmp_path, engine, precision, during):
    """FSDP2, ZeRO-2 and ZeRO-3, both precisions, killed in a step and in a save."""
    check(tmp_path, engine, precision, during)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "precision", "during"), REST)
def test_the_rest_of_the_matrix(tmp_path, engine, precision, during):
    """Every other engine, precision and kill."""
    check(tmp_path, engine, precision, during)
