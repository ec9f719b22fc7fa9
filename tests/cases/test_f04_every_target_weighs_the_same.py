# SPDX-License-Identifier: Apache-2.0
"""Case F04: each micro-batch's mean got equal weight, so that short micro-batches pulled too hard.

Reports: huggingface/transformers#34191, allenai/open-instruct#1736, MakazhanAlpamys/Soup#943.
"""

import json
import math

import pytest

from mprecipes import SampleOrder
from tests.fix64 import MODEL, RECIPE, options, write_rows
from tests.launching import launch
from tests.reading import journal, tensors

pytestmark = pytest.mark.launch
SEED = 1234
READ = "        data = mp.read_data("
RAGGED = """
class Ragged:
    is_deterministic = True

    def __init__(self, data):
        self.data, self.seq_length = data, data.seq_length

    def __len__(self):
        return len(self.data)

    def lengths(self, rows):
        return [2 if row in SHORT else 16 for row in rows]

    def num_targets(self, rows):
        return sum(self.lengths(rows.tolist())) - len(rows)

    def __getitem__(self, row):
        return self.__getitems__([row])[0]

    def __getitems__(self, rows):
        lengths, items = self.lengths(rows), self.data.__getitems__(rows)
        for length, item in zip(lengths, items):
            item["labels"] = item["labels"].clone()
            item["labels"][length:] = -100
        longest = max(lengths)
        return [{name: tensor[:longest] for name, tensor in item.items()} for item in items]


"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A copy of the recipe over rows of 2 and 16 tokens: one step of 8 rows, shared three ways."""
    home = tmp_path_factory.mktemp("f04")
    short = set(SampleOrder(8, SEED)(0, 4).tolist())  # the first micro-batch of four
    source = RECIPE.read_text()
    assert source.count(READ) == source.count("def main() -> None:") == 1
    source = source.replace(READ, "        data = read_ragged(")
    reader = (
        f"SHORT = {short}\n\n\ndef read_ragged(*arguments, **named):\n"
        "    data = mp.read_data(*arguments, **named)\n"
        "    return dataclasses.replace(data, train=Ragged(data.train))\n\n\n"
    )
    source = source.replace("def main() -> None:", RAGGED.lstrip() + reader + "def main() -> None:")
    copy = home / "ragged.py"
    copy.write_text(source.replace("import math\n", "import dataclasses\nimport math\n", 1))
    data, found = write_rows(home / "rows.jsonl", 8), {}
    model = json.dumps({**MODEL, "attention_dropout": 0.0})
    for name, size, num_processes in (("one", 8, 1), ("accumulated", 4, 1), ("two ranks", 4, 2)):
        found[name] = home / name
        words = options(
            data, found[name], model_config=model, per_device_train_batch_size=size,
            global_batch_size=8, max_steps=1, warmup_steps=0, max_grad_norm=None, precision="fp32",
            seed=SEED,
        )  # fmt: skip
        done = launch(copy, words, num_processes=num_processes)
        assert done.returncode == 0, done.output
    return found


@pytest.mark.parametrize("shared", ["accumulated", "two ranks"])
def test_f04_four_and_sixty_targets_are_one_batch_of_64(runs, shared):
    """Loss, norm and gradient (10 x the first moment) equal those of the one padded batch."""
    whole, parts = journal(runs["one"])[1], journal(runs[shared])[1]
    assert whole["tokens"] == parts["tokens"] == 64
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-6)
    expected, found = tensors(runs["one"], 1), tensors(runs[shared], 1)
    moments = [name for name in expected if name.endswith("/exp_avg")]
    assert len(moments) == 20
    squares = [
        (
            (expected[name] - found[name]).double().square().sum(),
            expected[name].double().square().sum(),
        )
        for name in moments
    ]
    difference, size = (math.sqrt(sum(column)) for column in zip(*squares))
    assert 10 * size == pytest.approx(whole["grad_norm"], rel=1e-5)
    assert difference / size < 1e-6
