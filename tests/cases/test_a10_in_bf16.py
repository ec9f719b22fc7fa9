# SPDX-License-Identifier: Apache-2.0
"""Case A10 in BF16: 1 process x 8 rows and 2 x 4 round and add otherwise; how much shows.

Reports: TensorAuto/OpenTau#180, NVIDIA/Megatron-LM#7299, mosaicml/composer#2409.
"""

import json

import pytest

from tests.fix64 import MODEL, RECIPE, options
from tests.launching import launch
from tests.reading import journal, manifest

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def runs(tmp_path_factory, fix64):
    """Number of processes -> the run of 8 steps of 8 rows: 1 x 8 and 2 x 4, dropout off."""
    found = {}
    model = json.dumps({**MODEL, "attention_dropout": 0.0})
    for count in (1, 2):
        found[count] = tmp_path_factory.mktemp(f"on-{count}") / "run"
        words = options(
            fix64, found[count], per_device_train_batch_size=8 // count, max_steps=8, save_steps=8,
            precision="bf16", model_config=model,
        )  # fmt: skip
        done = launch(RECIPE, words, num_processes=count)
        assert done.returncode == 0, done.output
    return found


def test_losses_agree_within_one_percent(runs):
    """Losses of all 8 steps differ by less than 1e-2 relative; some do differ."""
    one, two = (journal(runs[count]) for count in (1, 2))
    for step in range(1, 9):
        assert two[step]["batch_digest"] == one[step]["batch_digest"]
        assert two[step]["loss"] == pytest.approx(one[step]["loss"], rel=1e-2)
    assert [two[step]["loss"] for step in range(1, 9)] != [one[s]["loss"] for s in range(1, 9)]


def test_they_really_ran_so(runs):
    """The manifests say BF16, and 1 and 2 processes."""
    for count, run in runs.items():
        found = manifest(run, 8)
        assert found["precision"]["mode"] == "bf16"
        assert found["topology"]["world_size"] == count
