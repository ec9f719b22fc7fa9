# SPDX-License-Identifier: Apache-2.0
"""What importing the package, and the recipes, puts on the console."""

import logging
import subprocess
import sys

import pytest

import mprecipes  # noqa: F401 - what is looked at is what importing it did
from tests.fix64 import ROOT

RECIPES = ("sft_lora", "pretrain_causal_lm", "sft_chat")  # the first imports the most


@pytest.mark.parametrize(
    ("logger", "message", "is_heard"),
    [
        ("torchao", "Failed to load /x/torchao/_C_mxfp8.so: Could not load this library", False),
        ("torchao", "Skipping import of cpp extensions due to incompatible torch version", True),
        ("torch.utils._pytree", "%s: Calling register_constant() on Enum subclasses", False),
        ("torch.utils._pytree", "another warning", True),
    ],
)
def test_only_warnings_nobody_can_act_on_are_dropped(logger, message, is_heard):
    """Two messages of two loggers are left out, and every other one of theirs is not."""
    found = logging.getLogger(logger)
    record = found.makeRecord(logger, logging.WARNING, "file.py", 1, message, (), None)
    assert bool(found.filter(record)) == is_heard


def test_importing_the_recipes_prints_nothing():
    """Every process of a launch imports its recipe's file: what that prints comes once a rank."""
    recipes = [str(ROOT / "recipes" / f"{name}.py") for name in RECIPES]
    code = f"import runpy; [runpy.run_path(path) for path in {recipes!r}]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
