# SPDX-License-Identifier: Apache-2.0
"""Case I01: a tied output head was left out of the file, or came back untied.

Reports: huggingface/accelerate#2807, huggingface/accelerate#2875, safetensors/safetensors#98.
"""

import json
import subprocess
import sys

import pytest
from safetensors import safe_open

from tests.fix64 import MODEL, RECIPE, options
from tests.launching import environment, launch
from tests.reading import tensors

pytestmark = pytest.mark.launch
LOAD = """
import json, sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    head, embed = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    print(json.dumps({
        "same": head.data_ptr() == embed.data_ptr(), "equal": torch.equal(head, embed),
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "missing": sorted(info["missing_keys"]), "unexpected": sorted(info["unexpected_keys"]),
        "head": head.flatten()[:64].tolist(), "embed": embed.flatten()[:64].tolist(),
    }))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory, fix64):
    """Per kind of head: a run of 3 steps, and what a fresh process found in its export."""
    runs = {}
    for kind, tied in (("tied", True), ("untied", False)):
        runs[kind] = tmp_path_factory.mktemp(kind) / "run"
        model = json.dumps({**MODEL, "tie_word_embeddings": tied})
        done = launch(RECIPE, options(fix64, runs[kind], max_steps=3, model_config=model))
        assert done.returncode == 0, done.output
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *(str(run / "model") for run in runs.values())],
        env=environment(), check=True, capture_output=True, text=True,
    )  # fmt: skip
    return dict(zip(runs, zip(runs.values(), map(json.loads, done.stdout.splitlines()))))


def stored(run):
    with safe_open(run / "model" / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def test_i01_tied_stays_one_tensor(exported):
    """Loaded, head and embedding are one tensor again, with the trained values and their count."""
    run, found = exported["tied"]
    saved = tensors(run, 3)
    embed = saved["weights/model.embed_tokens.weight"]
    assert (found["same"], found["equal"], found["missing"], found["unexpected"]) == (
        True,
        True,
        [],
        [],
    )
    assert found["embed"] == embed.flatten()[:64].tolist()
    assert "weights/lm_head.weight" not in saved
    weights = {name: x for name, x in saved.items() if name.startswith("weights/")}
    assert found["parameters"] == sum(x.numel() for x in weights.values()) == 28864
    assert found["dtypes"] == ["torch.float32"]


def test_i01_untied_stays_two(exported):
    """Both tensors are in the file, they differ, and loaded they are the trained ones."""
    run, found = exported["untied"]
    saved, file = tensors(run, 3), stored(run)
    assert (found["same"], found["equal"], found["missing"], found["unexpected"]) == (
        False,
        False,
        [],
        [],
    )
    for key, name in (("head", "lm_head.weight"), ("embed", "model.embed_tokens.weight")):
        assert file[name].equal(saved[f"weights/{name}"])
        assert found[key] == file[name].flatten()[:64].tolist()
    weights = {name: x for name, x in saved.items() if name.startswith("weights/")}
    assert found["parameters"] == sum(x.numel() for x in weights.values()) == 28864 + 257 * 32
