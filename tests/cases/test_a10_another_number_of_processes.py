# SPDX-License-Identifier: Apache-2.0
"""Case A10: on another number of processes per-rank positions no longer fitted.

Reports: TensorAuto/OpenTau#180, NVIDIA/Megatron-LM#7299, mosaicml/composer#2409.
"""

import pytest

from tests.cases.conftest import watch
from tests.fix64 import RECIPE, options
from tests.launching import launch
from tests.reading import journal, manifest, outcomes

pytestmark = pytest.mark.launch
SHARED = {"global_batch_size": 8, "max_steps": 12, "save_steps": 4, "precision": "fp32"}


@pytest.fixture(scope="module")
def two(tmp_path_factory, fix64):
    """The reference: 2 processes x 4 rows."""
    return watch(tmp_path_factory.mktemp("two"), fix64, processes=[2], **SHARED)


@pytest.fixture(scope="module")
def moved(tmp_path_factory, fix64):
    """2 processes to step 4, 1 process with accumulation 2 to step 8, 2 processes to the end."""
    return watch(
        tmp_path_factory.mktemp("moved"), fix64, faults=["kill@step:4", "kill@step:8"],
        processes=[2, 1, 2], accumulation=[1, 2, 1], **SHARED,
    )  # fmt: skip


def test_each_step_sees_the_same_set_of_rows(two, moved):
    """The id set of every optimizer step is the reference's; each id comes once an epoch."""
    assert [sorted(step) for step in moved.all_rows] == [sorted(step) for step in two.all_rows]
    assert sorted(row for step in moved.all_rows[:8] for row in step) == list(range(64))
    expected, found = journal(two.path), journal(moved.path)
    for step in range(1, 13):
        assert found[step]["batch_digest"] == expected[step]["batch_digest"]


def test_losses_agree_with_dropout_on(two, moved):
    """In fp32 the losses of 2 -> 1 -> 2 processes are within 1e-5 of the reference."""
    expected, found = journal(two.path), journal(moved.path)
    for step in range(1, 13):
        assert found[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5)
        assert found[step]["learning_rate"] == expected[step]["learning_rate"]


def test_the_change_is_recorded(moved):
    """The manifest of each checkpoint tells how many processes saved it."""
    saved = {step: manifest(moved.path, step)["topology"]["world_size"] for step in (4, 8, 12)}
    assert saved == {4: 2, 8: 1, 12: 2}
    assert outcomes(moved.path) == ["killed", "killed", "finished"]


def test_another_global_batch_is_refused(moved, fix64):
    """A global batch of 16 in place of 8 is refused before training, with both and the flag."""
    words = options(fix64, moved.path, **{**SHARED, "global_batch_size": 16, "max_steps": 20})
    done = launch(RECIPE, words)
    assert done.returncode != 0
    assert "global_batch: 8 -> 16   allow with --accept changed_global_batch" in done.output
    assert "max_steps: 12 -> 20   allow with --accept changed_max_steps" in done.output
    assert "the settings the run was interrupted with" in done.output
    assert outcomes(moved.path)[-1] == "refused"
    assert max(journal(moved.path)) == 12
