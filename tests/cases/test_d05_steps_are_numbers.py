# SPDX-License-Identifier: Apache-2.0
"""Case D05: checkpoints were sorted as text, 1000 before 999, and an old one was resumed.

Reports: Lightning-AI/litgpt#661, huggingface/accelerate#1163.
"""

import random

import pytest

from tests.toys import Run

STEPS = [9, 10, 99, 100, 999, 1000]


@pytest.fixture(params=[STEPS, STEPS[::-1], [1000, 9, 999, 10, 100, 99]])
def folder(request, tmp_path):
    """Complete checkpoints of all steps, written in this order, so that times mislead too."""
    run = Run(tmp_path, keep_last=9)
    for step in request.param:
        run.save(step)
    return tmp_path


def test_d05_the_highest_step_is_resumed(folder):
    """1000 is chosen in whatever order the folders were written."""
    run = Run(folder)
    assert run.manager.candidates() == [1000, 999, 100, 99, 10, 9]
    assert run.manager.newest_trusted().step == 1000


def test_d05_rotation_keeps_the_highest_steps(folder):
    """Two kept of six are 999 and 1000."""
    run = Run(folder, keep_last=2)
    run.manager.release_retention()
    run.manager.wait()
    assert run.names() == ["step-00000999", "step-00001000"]


def test_d05_names_say_nothing(folder):
    """With every folder under a wrong name the step in the manifest still decides."""
    checkpoints = folder / "checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir())
    others = random.Random(1).sample(names, len(names))
    for name in names:
        (checkpoints / name).rename(checkpoints / f"moving-{name}")
    for name, other in zip(names, others, strict=True):
        (checkpoints / f"moving-{name}").rename(checkpoints / other)
    run = Run(folder)
    assert names != others
    assert run.manager.candidates() == [1000, 999, 100, 99, 10, 9]
    assert run.manager.restore(run.manager.newest_trusted()) == {"draws": 1000}
