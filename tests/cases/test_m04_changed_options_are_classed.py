# SPDX-License-Identifier: Apache-2.0
"""Case M04: an option changed at a resume is taken, or refused by name; never silently.

Cut at step 5, then launched with other options: the save interval takes effect without a flag;
seed, learning rate, data, sequence length and precision are refused without one.
"""

from dataclasses import dataclass

import pytest

from mprecipes.errors import ContractRefused
from mprecipes.identity.config import config_to_dict, option, parse_config, resume_classes
from mprecipes.resume.contract import check_contract


@dataclass(kw_only=True)
class Config:
    dataset: str = option("a.txt", help="rows", resume="free")
    seq_length: int = option(16, help="tokens per row", resume="free")
    precision: str = option("auto", help="mode", resume="free")
    seed: int = option(1, help="of everything")
    learning_rate: float = option(1e-3, help="peak")
    save_steps: int = option(2, help="steps between checkpoints", resume="free")


def launch(*words):
    """Gives the facts of a launch with these words, its config, and what it accepts."""
    config, origins = parse_config(Config, list(words))
    facts = {
        "recipe": {"name": "tiny", "version": "1.0.0", "sha256": "aa"},
        "precision": {"mode": "fp32" if config.precision == "auto" else config.precision},
        "topology": {"world_size": 1},
        "data": {
            "fingerprint": f"{config.dataset}, rows of {config.seq_length}",
            "num_sequences": 1024 // config.seq_length,
            "seed": config.seed,
            "global_batch": 4,
            "micro_batch": 4,
        },
        "environment": {"torch": "2.13.0"},
        "config": config_to_dict(config),
    }
    return facts, config, origins.accepted


def resume(*words):
    facts, config, accepted = launch(*words)
    return check_contract(
        launch()[0], facts, resume_classes(Config), accepted, where="manifest.json"
    ), config


def test_another_save_interval_takes_effect_and_is_shown():
    """2 -> 3 needs no flag: the new value is the one in use, and the change is listed."""
    differences, config = resume("--save_steps", "3")
    assert config.save_steps == 3
    assert [str(difference) for difference in differences] == ["save_steps: 2 -> 3"]


@pytest.mark.parametrize(
    ("words", "line", "flag"),
    [
        (["--seed", "2"], "seed: 1 -> 2", "changed_seed"),
        (["--learning_rate", "0.01"], "learning_rate: 0.001 -> 0.01", "changed_learning_rate"),
        (
            ["--dataset", "b.txt"],
            "data: a.txt, rows of 16 -> b.txt, rows of 16",
            "changed_data",
        ),
        (
            ["--seq_length", "32"],
            "data: a.txt, rows of 16 -> a.txt, rows of 32",
            "changed_data",
        ),
        (["--precision", "bf16"], "precision: fp32 -> bf16", "changed_precision"),
    ],
)
def test_what_changes_training_is_refused_without_its_flag(words, line, flag):
    """Exit 3 with old, new and flag in one line; with the flag the change is taken and listed."""
    with pytest.raises(ContractRefused) as error:
        resume(*words)
    assert error.value.exit_code == 3
    assert error.value.found.splitlines()[1:] == [f"    {line}   allow with --accept {flag}"]
    assert error.value.expected == "the settings the run was interrupted with"
    assert error.value.where == "manifest.json"
    assert error.value.action == f"undo the changes, or add --accept {flag} to mean them"
    differences, _ = resume(*words, "--accept", flag)
    assert line in [str(difference) for difference in differences]


def test_every_change_of_the_case_at_once_is_one_refusal():
    """Four lines for five options: data path and sequence length make one other data set."""
    with pytest.raises(ContractRefused) as error:
        resume(
            *["--seed", "2", "--learning_rate", "0.01", "--precision", "bf16"],
            *["--dataset", "b.txt", "--seq_length", "32"],
        )
    assert [line.split(":")[0].strip() for line in error.value.found.splitlines()[1:]] == [
        "data",
        "seed",
        "precision",
        "learning_rate",
    ]
