# SPDX-License-Identifier: Apache-2.0
"""Case K02: truncation cut the answer, all labels were ignored, and the mean of nothing was NaN.

Reports: huggingface/trl#6668, pytorch/pytorch#116349, NVIDIA-NeMo/Automodel#3797,
meta-llama/llama-cookbook#133.
"""

import math

import pytest

from tests.chats import write_jsonl
from tests.launching import launch
from tests.reading import journal, manifest, run_json
from tests.sft import CHAT, options

pytestmark = pytest.mark.launch


def rows(count, length):
    turns = [{"role": "user", "content": "x" * length}, {"role": "assistant", "content": "yes"}]
    return [{"messages": turns}] * count


def test_k02_four_of_eight_have_no_targets(tmp_path):
    """The report says 4, nothing is NaN, and every step is that of the other 4; two processes."""
    chat = {"truncation": "truncate_right", "batching": "plain"}
    losses = {}
    for name, count in (("with", 4), ("without", 0)):
        source = write_jsonl(tmp_path / f"{name}.jsonl", rows(4, 3) + rows(count, 90))
        words = options(source, tmp_path / name, chat=chat, seq_length=64, max_steps=3)
        done = launch(CHAT, words, num_processes=2)
        assert done.returncode == 0, done.output
        losses[name] = [line["loss"] for line in journal(tmp_path / name).values()]
    facts = manifest(tmp_path / "with", 3)["data"]
    assert (facts["counts"]["without_targets"], facts["num_sequences"]) == (4, 4)
    assert all(math.isfinite(loss) for loss in losses["with"])
    assert losses["with"] == losses["without"]


def test_k02_all_rows_empty_is_refused(tmp_path):
    """Nothing to learn is exit code 2 before the first step, with the count."""
    source = write_jsonl(tmp_path / "rows.jsonl", rows(8, 90))
    chat = {"truncation": "truncate_right"}
    done = launch(CHAT, options(source, tmp_path / "run", chat=chat, seq_length=64))
    assert done.returncode != 0
    assert run_json(tmp_path / "run")["attempts"][0]["exit_code"] == 2
    assert "without targets 8" in done.output
