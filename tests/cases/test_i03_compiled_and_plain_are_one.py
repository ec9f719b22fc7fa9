# SPDX-License-Identifier: Apache-2.0
"""Case I03: compiled models saved prefixed names, which a plain model could not load.

Reports: pytorch/pytorch#101107, pytorch/pytorch#158519.
"""

import pytest
import torch

from tests.reading import checkpoint, tensors
from tests.toys import Run, train_step


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


WRAPPERS = {
    "plain": lambda model: model,
    "wrapped": lambda model: torch.compile(model, backend="eager"),
    "in place": compiled_in_place,
}


def make(path, wrapper, seed=0):
    run = Run(path, seed=seed, width=8, num_layers=2)
    run.model = run.manager.model = WRAPPERS[wrapper](run.model)
    return run


def loss_of_the_next_step(run):
    train_step(run.model, run.optimizer, 3)
    with torch.no_grad():
        return run.model(torch.arange(8)).square().mean().item()


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("wrapped", "plain"), ("plain", "wrapped"), ("in place", "plain"), ("plain", "in place")],
)
def test_i03_saved_by_one_and_loaded_by_the_other(tmp_path, writer, reader):
    """Names are those of the plain model in every file; the next step's loss agrees within 1e-5."""
    plain, run = make(tmp_path / "plain", "plain"), make(tmp_path / "run", writer)
    for each in (plain, run):
        each.train([2])
    assert tensors(tmp_path / "run", 2).keys() == tensors(tmp_path / "plain", 2).keys()
    for path in checkpoint(tmp_path / "run", 2).iterdir():
        data = path.read_bytes()
        assert b"_orig_mod" not in data and b"module." not in data, path.name
    other = make(tmp_path / "run", reader, seed=7)
    manifest, _ = other.manager.restore_newest(lambda _: None)
    assert manifest.step == 2
    expected = loss_of_the_next_step(plain)
    assert loss_of_the_next_step(other) == pytest.approx(expected, rel=1e-5)
