# SPDX-License-Identifier: Apache-2.0
"""The script of `make test-gpu` works, and refuses a machine without a GPU."""

import pytest
import torch

from tests.gpu.modes import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_refuses(capsys):
    """Exit 2 with what was found, what is needed and what to do."""
    assert main([]) == 2
    said = capsys.readouterr().err
    assert "no CUDA device" in said and "expected: one GPU" in said and "--dry_run" in said


def test_the_dry_run_goes_through_every_mode(capsys):
    """On the processor with a tiny model: each mode is as asked, and repeats bit for bit."""
    assert main(["--dry_run"]) == 0
    said = capsys.readouterr().out
    assert said.count("asked = measured True, repeated bit-equal True") == 4
    assert "tf32: not run: device cpu" in said
