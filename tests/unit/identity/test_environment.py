# SPDX-License-Identifier: Apache-2.0
"""The environment says what a run was computed with, and what changed since."""

import json
import os
import platform
import subprocess

import torch

from mprecipes.identity import environment
from mprecipes.identity.environment import Change, compare_environment, describe_environment

FIELDS = [
    "python", "torch", "accelerate", "transformers", "datasets", "safetensors", "deepspeed",
    "numpy", "tokenizers", "torchao", "mprecipes", "platform", "cpu_model", "cpu_capability",
    "num_threads", "cuda", "cudnn", "nccl", "driver", "gpus", "git_commit", "git_dirty",
]  # fmt: skip


def git(folder, *words):
    names = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL")
    settings = os.environ | dict.fromkeys(names, "a@b") | {"GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(
        ["git", "-C", str(folder), *words], env=settings, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_description_has_every_field_and_survives_json():
    """All fields are there, in order, flat, and read back equal from JSON."""
    facts = describe_environment()
    assert list(facts) == FIELDS
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["num_threads"] == torch.get_num_threads()
    assert facts["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert isinstance(facts["gpus"], list)
    assert (facts["git_commit"], facts["git_dirty"]) == (None, None)


def test_absent_package_is_none(monkeypatch):
    """A package that is not installed is None, not an error."""
    monkeypatch.setattr(environment, "PACKAGES", ("numpy", "no-such-package-anywhere"))
    assert describe_environment()["no-such-package-anywhere"] is None


def test_commit_is_that_of_the_recipe_not_of_the_working_folder(tmp_path, monkeypatch):
    """Commit and dirtiness are read where the recipe lies; an untracked file is not dirt."""
    git(tmp_path, "init", "-q")
    (tmp_path / "r.py").write_text("x = 1\n")
    git(tmp_path, "add", "r.py")
    git(tmp_path, "commit", "-q", "-m", "one")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "untracked").write_text("x")
    clean = describe_environment(tmp_path / "r.py")
    assert (clean["git_commit"], clean["git_dirty"]) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "r.py").write_text("x = 2\n")
    assert describe_environment(tmp_path)["git_dirty"] is True


def test_recipe_outside_a_repository_has_no_commit(tmp_path, monkeypatch):
    """A plain copy outside any repository has no commit and is not called clean."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    facts = describe_environment(tmp_path / "r.py")
    assert (facts["git_commit"], facts["git_dirty"]) == (None, None)


def test_machine_without_git_has_no_commit(tmp_path, monkeypatch):
    """Without git on the machine the commit is None."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_environment(tmp_path)["git_commit"] is None


def test_no_path_or_host_is_recorded(tmp_path):
    """The description names no folder and no host of this machine."""
    text = json.dumps(describe_environment(tmp_path))
    assert str(tmp_path) not in text
    assert os.path.expanduser("~") + "/" not in text


def test_changes_are_listed_old_to_new():
    """Every differing field is listed, absent ones as None, equal ones not at all."""
    old = {"torch": "2.12", "numpy": "2.4", "gone": 1}
    new = {"numpy": "2.4", "torch": "2.13", "gpus": ["H100"]}
    changes = compare_environment(old, new)
    assert changes == [
        Change("torch", "2.12", "2.13"),
        Change("gpus", None, ["H100"]),
        Change("gone", 1, None),
    ]
    assert str(changes[0]) == "torch: 2.12 -> 2.13"
    assert compare_environment(new, new) == []
