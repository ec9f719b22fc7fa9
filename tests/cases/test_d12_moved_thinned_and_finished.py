# SPDX-License-Identifier: Apache-2.0
"""Cases D10 and D12: state held absolute paths of the machine it was trained on.

Report: huggingface/transformers#48315.
"""

import shutil

import pytest

from tests.cases.conftest import go_on
from tests.reading import assert_same_run, checkpoint, outcomes

pytestmark = pytest.mark.launch


def test_d12_moved_and_thinned_it_goes_on_to_the_end(fix64, stopped, whole, copied):
    """Trained to 9, moved, old ones deleted, resumed to 12: exit 0, bit-equal, no old path."""
    run = copied(stopped)
    for step in (3, 6):
        shutil.rmtree(checkpoint(run, step))
    assert not stopped.trained_at.exists()
    done = go_on(fix64, run)
    assert done.returncode == 0, done.output
    assert "resumed from step-00000009, every file verified" in done.output
    assert outcomes(run) == ["killed", "finished"]
    assert_same_run(run, whole)
    files = [path for path in (run / "checkpoints").rglob("*") if path.is_file()]
    assert len(files) == 2 * 5
    for path in [*files, *(run / "resume").iterdir(), *(run / "journal").iterdir()]:
        for place in (stopped.trained_at, run, fix64):
            assert str(place).encode() not in path.read_bytes(), path
