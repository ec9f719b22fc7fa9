# SPDX-License-Identifier: Apache-2.0
"""Case A12: a save at an epoch's end resumed with an empty or repeated epoch.

Reports: huggingface/accelerate#4264, Red-Hat-AI-Innovation-Team/mini_trainer#79,
meta-pytorch/data#1437.
"""

import pytest

from tests.cases.conftest import CUTS
from tests.reading import journal

pytestmark = pytest.mark.launch


@pytest.mark.parametrize("cut", [15, 16, 17, 32])
def test_the_step_after_the_cut_is_the_next_of_the_run(reference, cut_run, cut):
    """The process after the cut begins at step cut + 1 with the reference's rows of that step."""
    launched = cut_run.rows[CUTS.index(cut) + 1]
    assert launched[0] == reference.all_rows[cut]
    assert journal(cut_run.path)[cut + 1]["attempt"] == CUTS.index(cut) + 1


def test_position_at_an_epochs_end_has_one_form(cut_run):
    """After step 16 the position is 64 samples: epoch 1, offset 0."""
    assert journal(cut_run.path)[16]["samples_seen"] == 64
