# SPDX-License-Identifier: Apache-2.0
"""Case C01: files of a checkpoint were pickles; what cannot be trusted must not be unpickled.

Reports: huggingface/transformers#34631, huggingface/transformers#40500, allenai/open-instruct#673,
modelscope/ms-swift#5235.
"""

import json
import os
import pickle
import re
import subprocess
import sys

import pytest

from tests.cases.conftest import go_on
from tests.reading import assert_same_run, checkpoint, quarantined

pytestmark = pytest.mark.launch


class Attack:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_c01_files_of_a_real_checkpoint_are_tensors_json_or_plain_text(stopped):
    """Every file beside the tensors loads as JSON, or is lines that sha256sum reads."""
    seen = set()
    for path in checkpoint(stopped.path, 9).iterdir():
        if path.name == "SHA256SUMS":
            lines = path.read_text(encoding="ascii").splitlines()
            assert all(re.fullmatch(r"[0-9a-f]{64}  [\w.-]+", line) for line in lines)
        elif path.suffix != ".safetensors":
            json.loads(path.read_text(encoding="ascii"))
        seen.add(path.suffix or path.name)
    assert seen == {".safetensors", ".json", "SHA256SUMS"}


def test_c01_pickles_are_refused_by_digest_and_never_run(fix64, stopped, whole, copied, tmp_path):
    """In place of random states and of tensors they fail their digests; step 3 goes on."""
    run, mark = copied(stopped), tmp_path / "mark"
    attack = pickle.dumps(Attack(mark))
    (checkpoint(run, 9) / "rank-00000.json").write_bytes(attack)
    (checkpoint(run, 6) / "tensors-rank00000-000.safetensors").write_bytes(attack)
    done = go_on(fix64, run)
    assert done.returncode == 0, done.output
    assert "resumed from step-00000003, every file verified" in done.output
    assert not mark.exists()
    assert quarantined(run) == [
        "step-00000006", "step-00000006.reason.json", "step-00000009", "step-00000009.reason.json",
    ]  # fmt: skip
    for step, file in ((9, "rank-00000.json"), (6, "tensors-rank00000-000.safetensors")):
        reason = json.loads((run / "quarantine" / f"step-{step:08d}.reason.json").read_text())
        assert [problem["path"] for problem in reason["problems"]] == [file]
    assert_same_run(run, whole)
    code = f"import pickle; pickle.loads({attack!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert mark.exists(), "the attack was no attack"
