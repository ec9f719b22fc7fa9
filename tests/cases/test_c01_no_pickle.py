# SPDX-License-Identifier: Apache-2.0
"""Case C01: random states were pickles, refused since torch 2.6, and a pickle can run anything.

Reports: huggingface/transformers#34631, huggingface/transformers#40500, allenai/open-instruct#673,
modelscope/ms-swift#5235.
"""

import hashlib
import json
import os
import pickle
import re

import pytest
import torch

from mprecipes.errors import RecipeError
from mprecipes.identity.files import canonical_json
from tests.toys import Run

DATA = ["tensors-rank00000-000.safetensors", "rank-00000.json"]


class Attack:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    run.train([1, 2])
    return run


def newest(run):
    return run.folder.checkpoints / "step-00000002"


def test_c01_every_file_is_tensors_json_or_plain_text(run):
    """Each file beside the tensors loads as JSON, or is lines that sha256sum reads."""
    others = [path for path in newest(run).iterdir() if path.suffix != ".safetensors"]
    assert sorted(path.name for path in others) == [
        "SHA256SUMS",
        "manifest.json",
        "rank-00000.json",
    ]
    for path in others:
        text = path.read_text(encoding="ascii")
        if path.name == "SHA256SUMS":
            assert all(re.fullmatch(r"[0-9a-f]{64}  [\w.-]+", line) for line in text.splitlines())
        else:
            json.loads(text)


def test_c01_the_attack_is_real(tmp_path):
    """The planted pickle does what it says when something unpickles it."""
    pickle.loads(pickle.dumps(Attack(tmp_path / "mark")))
    assert (tmp_path / "mark").is_dir()


@pytest.mark.parametrize("file", [*DATA, "manifest.json", "SHA256SUMS"])
def test_c01_a_planted_pickle_is_refused_and_does_not_run(run, tmp_path, file):
    """In place of any file it fails the checksum; the checkpoint before is restored."""
    (newest(run) / file).write_bytes(pickle.dumps(Attack(tmp_path / "mark")))
    again = Run(run.folder.path)
    manifest = again.manager.newest_trusted()
    assert manifest.step == 1
    again.manager.restore(manifest)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("form", ["pickle", "torch.save"])
@pytest.mark.parametrize("file", DATA)
def test_c01_not_even_with_right_checksums(run, tmp_path, file, form):
    """A pickle that manifest and sums vouch for is still not run: nothing here unpickles."""
    path = newest(run) / file
    if form == "pickle":
        path.write_bytes(pickle.dumps(Attack(tmp_path / "mark")))
    else:
        torch.save(Attack(tmp_path / "mark"), path)
    data, values = path.read_bytes(), json.loads((newest(run) / "manifest.json").read_text())
    for entry in values["files"]:
        if entry["path"] == file:
            entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    lines = [f"{entry['sha256']}  {entry['path']}\n" for entry in values["files"]]
    (newest(run) / "SHA256SUMS").write_text("".join(lines))
    rest = {key: value for key, value in values.items() if key != "root_sha256"}
    values["root_sha256"] = hashlib.sha256(canonical_json(rest)).hexdigest()
    (newest(run) / "manifest.json").write_text(json.dumps(values, indent=1) + "\n")
    again = Run(run.folder.path)
    manifest = again.manager.newest_trusted()
    assert manifest.step == 2
    with pytest.raises(RecipeError, match=file):
        again.manager.restore(manifest)
    assert not (tmp_path / "mark").exists()
