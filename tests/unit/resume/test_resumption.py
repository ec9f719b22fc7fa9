# SPDX-License-Identifier: Apache-2.0
"""A recipe's one call to go on: facts, checkpoint, contract and random streams together."""

import json
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mprecipes as mp
from mprecipes.errors import ContractRefused
from mprecipes.identity.config import Origins, config_to_dict
from tests.kept import flip


@dataclass(kw_only=True)
class Config:
    output_dir: str = mp.option(help="run folder", resume="free")
    dataset: str = mp.option(help="text", resume="free")
    text_field: str = mp.option("text", help="field", resume="free")
    on_bad_rows: str = mp.option("refuse", help="rows", resume="free")
    tokenizer: str = mp.option("bytes", help="tokenizer", resume="free")
    train_tokenizer_vocab: int | None = mp.option(None, help="vocabulary", resume="free")
    seq_length: int = mp.option(8, help="tokens", resume="free")
    eval_fraction: float | None = mp.option(None, help="share", resume="free")
    precision: str = mp.option("fp32", help="mode", resume="free")
    per_device_train_batch_size: int = mp.option(2, help="rows", resume="free")
    gradient_accumulation_steps: int | None = mp.option(None, help="forwards", resume="free")
    global_batch_size: int | None = mp.option(None, help="rows", resume="free")
    numerics: dict[str, Any] | None = mp.option(None, help="numbers", resume="free")
    max_steps: int = mp.option(4, help="steps")
    learning_rate: float = mp.option(0.1, help="peak")
    seed: int = mp.option(5, help="seed")


RECIPE = mp.Recipe(name="stand_in", version="1.0.0")
pytestmark = pytest.mark.usefixtures("fresh_accelerator")


@pytest.fixture
def config(tmp_path):
    rows = "".join(json.dumps({"text": f"row {i:03d}"}) + "\n" for i in range(10))
    (tmp_path / "rows.jsonl").write_text(rows)
    return Config(output_dir=str(tmp_path / "run"), dataset=str(tmp_path / "rows.jsonl"))


def attempt(config, *, save_at=None, accepted=()):
    """Opens the run once; gives the position, the facts, the next random number and the weight."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters())
    origins = Origins(dict.fromkeys(config_to_dict(config), "default"))
    origins.accepted = accepted
    with (
        mp.start(config, origins) as launch,
        mp.open_run(config, origins, RECIPE, launch.ranks) as run,
    ):
        data = mp.read_data(config, launch.ranks, should_stop=lambda: False)
        mp.seed_everything(config.seed)
        manager = mp.CheckpointManager(
            folder=run, ranks=launch.ranks, model=model, optimizer=optimizer
        )
        facts = mp.run_facts(run, launch, data, config)
        position, probation = mp.resume_run(run, launch, manager, facts, config, origins)
        weight = model.weight.item()
        if save_at is not None:
            with torch.no_grad():
                model.weight.fill_(3.0)
            random.random()
            state = {"random": mp.capture_random_state(launch.device)}
            position = mp.Position(save_at, save_at, 8, 56)
            manager.save(position, facts=facts, rank_state=state, wait=True)
            raise_stop()
        return position, facts, random.random(), weight, probation


class Stopped(Exception):
    pass


def raise_stop():
    raise Stopped


def test_facts_are_those_a_manifest_needs(config):
    """Recipe, precision, topology, data with seed and batch, environment, config; all JSON."""
    _, facts, *_ = attempt(config)
    assert list(facts) == ["recipe", "precision", "topology", "data", "environment", "config"]
    assert facts == json.loads(json.dumps(facts))
    assert facts["recipe"]["name"] == "stand_in" and facts["precision"]["mode"] == "fp32"
    wanted = {"seed": 5, "global_batch": 2, "micro_batch": 2, "num_sequences": 10}
    assert wanted.items() <= facts["data"].items()
    assert facts["topology"]["world_size"] == 1


def test_facts_hold_no_absolute_path(config, tmp_path):
    """Where the run and its data lie is left out of what a checkpoint records; names stay."""
    _, facts, *_ = attempt(config)
    assert str(tmp_path) not in json.dumps(facts)
    assert facts["config"]["output_dir"] == ".../run"
    assert facts["config"]["dataset"] == facts["data"]["source"] == ".../rows.jsonl"


def test_the_next_attempt_has_weights_position_and_streams(config, capsys):
    """After a save at step 2 the next launch has weight 3.0, position 2, and the next number."""
    with pytest.raises(Stopped):
        attempt(config, save_at=2)
    expected = random.random()
    position, _, number, weight, probation = attempt(config)
    assert position == mp.Position(2, 2, 8, 56)
    assert (number, weight, probation.verdict) == (expected, 3.0, "on_probation")
    out = capsys.readouterr().out
    assert "attempt 1: resumed from step-00000002, every file verified" in out
    assert "on probation: 5 steps are observed" in out
    ended = json.loads((Path(config.output_dir) / "run.json").read_text())["attempts"][-1]
    assert (ended["outcome"], ended["step"]) == ("finished", 2)  # where it was, not 0


def test_a_run_that_was_killed_after_its_last_save_says_that_nothing_is_left(config, capsys):
    """No step is observed any more: what follows the last one is done, the export."""
    with pytest.raises(Stopped):
        attempt(config, save_at=4)
    attempt(config)
    out = capsys.readouterr().out
    assert "all 4 steps were made: what follows the last one is done now" in out
    assert "are observed" not in out


def test_a_changed_option_is_refused_and_can_be_accepted(config, capsys):
    """Another peak learning rate needs its flag; accepted, the change is shown."""
    with pytest.raises(Stopped):
        attempt(config, save_at=2)
    with pytest.raises(ContractRefused) as caught:
        attempt(replace(config, learning_rate=0.2))
    assert "learning_rate: 0.1 -> 0.2" in caught.value.found
    assert "--accept changed_learning_rate" in caught.value.action
    attempt(replace(config, learning_rate=0.2), accepted=["changed_learning_rate"])
    assert "changed: learning_rate: 0.1 -> 0.2" in capsys.readouterr().out


def test_a_checkpoint_that_was_removed_by_hand_is_named(config, capsys):
    """What `run.json` knows to be published last and is nowhere is told at the next start."""
    with pytest.raises(Stopped):
        attempt(config, save_at=2)
    run = Path(config.output_dir)
    assert json.loads((run / "run.json").read_text())["attempts"][0]["checkpoint"] == (
        "step-00000002"
    )
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    position, *_ = attempt(config)
    assert position.step == 0
    assert "step-00000002 was published and is not here" in capsys.readouterr().out


def test_a_checkpoint_in_quarantine_is_not_called_missing(config, capsys):
    """It was refused, which is told elsewhere; with an older one the run goes on."""
    with pytest.raises(Stopped):
        attempt(config, save_at=2)
    with pytest.raises(Stopped):
        attempt(config, save_at=3)
    run = Path(config.output_dir)
    flip(next((run / "checkpoints" / "step-00000003").glob("*.safetensors")))
    position, *_ = attempt(config)
    assert position.step == 2
    assert "is not here" not in capsys.readouterr().out
