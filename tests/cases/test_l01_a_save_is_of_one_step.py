# SPDX-License-Identifier: Apache-2.0
"""Case L01: the background writer read live tensors, and a file held parts of two steps.

Reports: pytorch/pytorch#144657, Lightning-AI/pytorch-lightning#21079.
"""

import pytest
import torch

from tests.reading import assert_same_state, manifest
from tests.toys import Run


@pytest.mark.parametrize("point", ["save.begin", "save.before_digest", "save.before_file"])
def test_l01_the_file_holds_the_state_of_the_save(tmp_path, monkeypatch, point):
    """Five steps go on while the writer is held back: each tensor is that of a synchronous save."""
    sizes = {"width": 16, "num_layers": 3}
    Run(tmp_path / "one", **sizes).train([3])
    run = Run(tmp_path / "two", **sizes)
    monkeypatch.setenv("MPRECIPES_FAULT", f"slow@{point}:3")
    run.train([3], wait=False)
    weight = run.model.embed.weight.detach().clone()
    run.train([4, 5, 6, 7, 8], save=False)
    assert run.manager.finished() == []  # all five steps were made before the file was
    assert not torch.equal(weight, run.model.embed.weight)
    run.manager.wait()
    assert_same_state(tmp_path / "one", tmp_path / "two", 3)
    found, expected = manifest(tmp_path / "two", 3), manifest(tmp_path / "one", 3)
    for key in ("state_digests", "step", "updates", "samples_seen", "tokens_seen", "files"):
        assert found[key] == expected[key]
