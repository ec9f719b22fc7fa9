# SPDX-License-Identifier: Apache-2.0
"""The README's own commands, as they stand there, in a folder as a newcomer has it."""

import json
import re
import shlex

import pytest

from tests.launching import ROOT, run_command
from tests.reading import outcomes

pytestmark = pytest.mark.launch
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def commands(word):
    """Gives the commands of the README's shell blocks that begin with a word."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(word)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout whose tiny model is tinier, with a folder of the user's own texts."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("accelerate_configs", "recipes/pretrain_causal_lm.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(ROOT / name)
    config = "recipes/configs/pretrain_causal_lm/tiny-cpu.yaml"
    (folder / config).parent.mkdir(parents=True)
    text = (ROOT / config).read_text()
    for key, value in SMALL.items():
        text = re.sub(rf"{key}: \d+", f"{key}: {value}", text)
    (folder / config).write_text(text.replace("max_steps: 300", "max_steps: 4"))
    (folder / "my-texts").mkdir()
    for i in range(30):
        row = json.dumps({"text": f"text number {i} " * 100})
        (folder / "my-texts" / f"{i}.jsonl").write_text(row + "\n")
    return folder


def test_your_own_data_then_a_look(checkout):
    """The launch on a folder of one's own texts finishes; status says so, verify finds it whole."""
    (launch,) = commands("accelerate launch")
    done = run_command(launch, cwd=checkout)
    assert done.returncode == 0, done.output
    assert outcomes(checkout / "runs" / "mine") == ["finished"]
    looks = commands("mprecipes status") + commands("mprecipes verify")
    assert len(looks) == 2
    for command in looks:
        done = run_command(command, cwd=checkout)
        assert done.returncode == 0, done.output


def test_the_drill_of_the_page(checkout):
    """The drill command ends with everything equal and exit 0."""
    (drill,) = commands("mprecipes drill")
    done = run_command(drill, cwd=checkout)
    assert done.returncode == 0, done.output
    assert "EQUAL" in done.output
