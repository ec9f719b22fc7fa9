# SPDX-License-Identifier: Apache-2.0
"""SFT runs killed and resumed: bit-equal, packed or padded, in full or with adapters.

`make test` drills each recipe once, so that packed and grouped rows, one and two processes, loader
workers, noise and evaluation all occur; `make test-full` the rest.
"""

import itertools
import json

import pytest

from mprecipes.tools.drill import run_drill
from tests.reading import checkpoint, manifest, tensors
from tests.sft import CHAT, LORA, ROOT, options, write_chats

pytestmark = pytest.mark.launch
GROUPED = {"chat": {"batching": "grouped", "padding_side": "left"}}
NOISE = {"tuning": {"neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1}}
CASES = {
    "chat-grouped": (CHAT, 1, {**GROUPED, **NOISE, "dataloader_num_workers": 1}),
    "lora-packed-two": (LORA, 2, {"lora": {"r": 4, "lora_dropout": 0.1}, "eval_fraction": 0.1,
                                  "eval_steps": 6}),
}  # fmt: skip
REST = {
    "chat-packed": (CHAT, 1, {}),
    "chat-packed-two": (CHAT, 2, {"eval_fraction": 0.1, "eval_steps": 6}),
    "chat-grouped-two": (CHAT, 2, GROUPED),
    "chat-plain": (CHAT, 1, {"chat": {"batching": "plain", "truncation": "split"}}),
    "chat-checkpointing": (CHAT, 1, {"gradient_checkpointing": True, **NOISE}),
    "lora-packed": (LORA, 1, {}),
    "lora-grouped-two": (LORA, 2, {**GROUPED, **NOISE}),
    "lora-checkpointing": (LORA, 1, {"gradient_checkpointing": True}),
}
EVALUATED = {"eval_fraction": 0.1, "eval_steps": 6}
SHARDED = list(itertools.product(("fsdp2", "zero2", "zero3"), (CHAT, LORA), ("fp32", "bf16")))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """As every launch of the tests: the drill passes this environment on."""
    for name in ("MPRECIPES_CPU_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")


def check(folder, recipe, num_processes, changed, config="cpu"):
    words = options(write_chats(folder / "rows.jsonl"), None, **changed)
    result = run_drill(
        recipe, folder / "drill", arguments=words, kill_at_steps=(7,), num_processes=num_processes,
        accelerate_config=ROOT / "accelerate_configs" / f"{config}.yaml", timeout=240.0,
    )  # fmt: skip
    assert result.equal, [row for row in result.rows if not row.equal]
    assert [(kill.step, kill.resumed_from) for kill in result.kills] == [(7, 4)]
    run = folder / "drill" / "interrupted"
    stored, facts = tensors(run, 12), manifest(run, 12)
    assert {str(each.dtype) for each in stored.values()} == {"torch.float32"}
    is_lora = recipe == LORA
    assert all(("lora_" in name) == is_lora for name in stored)
    assert ("frozen" in facts) == is_lora
    assert "pretrained.json" in {each["path"] for each in facts["files"]}
    assert facts["data"]["targets"] > 0
    assert (run / "model" / "config.json").is_file()
    assert (run / "adapter" / "adapter_config.json").is_file() == is_lora
    assert "sft_" in (run / "model" / "README.md").read_text()
    if "eval_steps" in changed:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        seen = {line["step"] for line in map(json.loads, lines) if "eval/loss" in line}
        assert seen == {0, 6, 12}
    assert checkpoint(run, 12).is_dir()
    return run


@pytest.mark.parametrize("name", CASES)
def test_covering_sft_drills(tmp_path, name):
    """Each recipe once, every factor in one of them."""
    check(tmp_path, *CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_the_rest_of_the_sft_drills(tmp_path, name):
    """Every other combination that is worth a drill."""
    check(tmp_path, *REST[name])


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "recipe", "precision"), SHARDED)
def test_sharded_sft(tmp_path, engine, recipe, precision):
    """Both recipes on FSDP2, ZeRO-2 and ZeRO-3, with a frozen base or without; both export."""
    config = engine if precision == "fp32" else f"{engine}_{precision}"
    run = check(tmp_path, recipe, 2, {"precision": precision, **EVALUATED}, config)
    assert manifest(run, 12)["topology"]["sharding"] == engine
