# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of a real SFT run, however its rows are shared: the same loss and gradient."""

import pytest

from tests.launching import launch
from tests.reading import journal, tensors
from tests.sft import CHAT, MODEL, options, write_chats

pytestmark = pytest.mark.launch
WAYS = {  # micro-batch, processes; the global batch is 8
    "one of 8": (8, 1),
    "four of 2 on two processes": (2, 2),
}
MORE = {"four of 2": (2, 1), "two of 4 on two processes": (4, 2)}


def step(folder, micro, num_processes, name):
    words = options(
        write_chats(folder / "rows.jsonl"), folder / name, model_config={**MODEL,
        "attention_dropout": 0.0}, per_device_train_batch_size=micro, global_batch_size=8,
        max_steps=1, warmup_steps=0, precision="fp32", max_grad_norm=None,
    )  # fmt: skip
    done = launch(CHAT, words, num_processes=num_processes)
    assert done.returncode == 0, done.output
    gradient = {
        key: value for key, value in tensors(folder / name, 1).items() if key.endswith("/exp_avg")
    }
    return journal(folder / name)[1], gradient


def compare(folder, ways):
    first, *others = [step(folder, *way, name.replace(" ", "-")) for name, way in ways.items()]
    for line, gradient in others:
        assert line["batch_digest"] == first[0]["batch_digest"]
        assert line["tokens"] == first[0]["tokens"]
        assert line["loss"] == pytest.approx(first[0]["loss"], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(first[0]["grad_norm"], rel=1e-6)
        assert gradient.keys() == first[1].keys()
        for name, moment in gradient.items():  # a tenth of the gradient
            assert (moment - first[1][name]).abs().max() < 1e-7


def test_one_and_two_processes_make_the_same_step(tmp_path):
    """Uneven answers over accumulation 1 and 2, on 1 and 2 processes: equal to 1e-6."""
    compare(tmp_path, WAYS)


@pytest.mark.slow
def test_every_way_makes_the_same_step(tmp_path):
    """Accumulation 1, 2 and 4, on 1 and 2 processes."""
    compare(tmp_path, WAYS | MORE)
