# SPDX-License-Identifier: Apache-2.0
"""The options tuning and lora: strict, with their defaults."""

import pytest

from mprecipes import lora_options, tuning_options
from mprecipes.compute.tuning import LoraOptions, TuningOptions
from mprecipes.errors import ConfigError


def test_defaults_trust_nobody():
    """Code that comes with a model does not run unless asked; no noise, no smoothing."""
    assert tuning_options(None) == TuningOptions()
    assert TuningOptions().trust_remote_code is False
    assert (TuningOptions().neftune_noise_alpha, TuningOptions().label_smoothing_factor) == (
        None,
        0,
    )


def test_what_peft_is_given():
    """Every linear module by default, or those that are named."""
    assert lora_options(None).to_peft() == {
        "r": 16, "lora_alpha": 32.0, "lora_dropout": 0.0, "target_modules": "all-linear",
        "use_rslora": False, "task_type": "CAUSAL_LM",
    }  # fmt: skip
    found = lora_options({"r": 4, "target_modules": ["q_proj"]}).to_peft()
    assert (found["r"], found["target_modules"]) == (4, ["q_proj"])
    assert hash(LoraOptions()) == hash(LoraOptions())


@pytest.mark.parametrize(
    ("read", "values", "option", "name"),
    [
        (tuning_options, {"label_smoothing_factor": 1.0}, "tuning", "label_smoothing_factor"),
        (tuning_options, {"neftune_noise_alpha": 0.0}, "tuning", "neftune_noise_alpha"),
        (tuning_options, {"num_generations": -1}, "tuning", "num_generations"),
        (tuning_options, {"max_new_tokens": 0}, "tuning", "max_new_tokens"),
        (tuning_options, {"attn_implementation": "flash"}, "tuning", "attn_implementation"),
        (tuning_options, {"trust_remote_code": "yes"}, "tuning", "trust_remote_code"),
        (lora_options, {"r": 0}, "lora", "r"),
        (lora_options, {"lora_alpha": 0}, "lora", "lora_alpha"),
        (lora_options, {"lora_alpha": -16.0}, "lora", "lora_alpha"),
        (lora_options, {"lora_alpha": float("nan")}, "lora", "lora_alpha"),
        (lora_options, {"lora_dropout": 1.0}, "lora", "lora_dropout"),
        (lora_options, {"target_modules": "q_proj"}, "lora", "target_modules"),
    ],
)
def test_wrong_values_are_refused(read, values, option, name):
    """Each with what was found, what was expected, where, and what to do."""
    with pytest.raises(ConfigError) as error:
        read(values)
    assert error.value.found.startswith(f"{name} is ")
    assert error.value.expected
    assert error.value.where == f"{name} in option {option}"
    assert error.value.action


def test_unknown_names_are_refused():
    """The nearest name is given."""
    with pytest.raises(ConfigError) as error:
        lora_options({"alpha": 3})
    assert error.value.found == "unknown name alpha"
    assert "lora_alpha" in error.value.expected
    assert error.value.where == "option lora"
    assert error.value.action
