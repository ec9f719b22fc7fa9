# SPDX-License-Identifier: Apache-2.0
"""Case K05: a malformed line failed without file and line, or took its whole file with it.

Reports: NVIDIA-NeMo/Automodel#1694, microsoft/graphrag#2424, wandb/rai-toolkit#82.
"""

import re

import pytest

from tests.fix64 import RECIPE, options
from tests.launching import launch
from tests.reading import manifest, run_json

pytestmark = pytest.mark.launch
GOOD = [b'{"text": "first text of A"}', b'{"text": "other text of B"}']
BAD = [b"", b'{"text": "b"', GOOD[1], b"[]", b'{"text": 5}', b'{"text": "\xff\xfe"}']


def test_k05_refused_by_line_and_skipped_by_number(tmp_path):
    """Refused at line 3 with exit code 2; asked to skip, it uses two rows and counts five skips."""
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    (data / "a.jsonl").write_bytes(b"\n".join([GOOD[0], *BAD]) + b"\n")
    (data / "b.jsonl").write_bytes(b"")
    changes = {"max_steps": 1, "per_device_train_batch_size": 1}
    done = launch(RECIPE, options(data, run, **changes))
    assert done.returncode != 0
    assert run_json(run)["attempts"][0]["exit_code"] == 2
    assert f"{data}/a.jsonl:3: broken JSON" in done.output
    assert re.search(r"expected: .*valid UTF-8", done.output)
    assert re.search(r"next: .*--on_bad_rows skip", done.output)
    assert not (run / "checkpoints").exists() or not list((run / "checkpoints").iterdir())
    done = launch(RECIPE, options(data, run, **changes, on_bad_rows="skip"))
    assert done.returncode == 0, done.output
    facts = manifest(run, 1)["data"]
    assert facts["num_documents"] == 2
    assert facts["num_sequences"] == 2 * 16 // 16
    assert sum(facts["skipped_rows"].values()) == 5
    assert facts["skipped_rows"] == {
        "bad UTF-8": 1,
        "broken JSON": 1,
        "empty file": 1,
        "not a JSON object": 1,
        "text is not a string": 1,
    }
