# SPDX-License-Identifier: Apache-2.0
"""Case K08: rows were repeated to even out the ranks, trained double and evaluated twice.

Reports: huggingface/accelerate#2316, huggingface/accelerate#961, huggingface/accelerate#781.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from mprecipes import read_metrics
from tests.cases.conftest import watch
from tests.fix64 import write_rows

pytestmark = pytest.mark.launch
# A learning rate of zero: every evaluation, and the export, is of the same weights.
OPTIONS = {
    "eval_fraction": 0.5, "eval_steps": 1, "learning_rate": 0.0, "max_steps": 5,
    "precision": "fp32", "per_device_train_batch_size": 2, "global_batch_size": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """10 rows to train on and 10 held out, batch 2, on 1 and on 2 processes; and all 20 texts."""
    data = write_rows(tmp_path_factory.mktemp("k08") / "rows.jsonl", 20)
    home = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    one = watch(home[0], data, processes=[1], accumulation=2, **OPTIONS)
    two = watch(home[1], data, processes=[2], accumulation=1, **OPTIONS)
    return one, two, [json.loads(line)["text"] for line in data.read_text().splitlines()]


def evaluations(run):
    return [line for line in read_metrics(run.path / "metrics.jsonl")[0] if "eval/loss" in line]


def test_k08_each_row_once_an_epoch(runs):
    """Ten samples are an epoch of ten different rows, also where a global batch of 4 spans two."""
    for run in runs[:2]:
        samples = [row for step in run.all_rows for row in step]
        assert len(samples) == 20
        assert set(samples) == set(range(10))
    assert [sorted(step) for step in runs[0].all_rows] == [
        sorted(step) for step in runs[1].all_rows
    ]
    first = [row for step in runs[0].all_rows for row in step][:10]
    assert sorted(first) == list(range(10))


def test_k08_evaluation_is_exact_over_every_row_once(runs):
    """Both count 10 x 15 targets and give the loss that a plain loop over the ten rows gives."""
    one, two, texts = runs
    model = AutoModelForCausalLM.from_pretrained(two.path / "model").eval()
    ids = torch.tensor([[*text.encode(), 256] for text in texts[10:]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, ids[:, 1:].flatten()).item()
    hits = (logits.argmax(-1) == ids[:, 1:].flatten()).float().mean().item()
    for run in (one, two):
        found = evaluations(run)
        assert [line["step"] for line in found] == [0, 1, 2, 3, 4, 5]
        for line in found:
            assert line["eval/loss"] == pytest.approx(expected, rel=1e-6)
            assert line["eval/tokens"] == 150
            assert line["eval/token_accuracy"] == pytest.approx(hits)
