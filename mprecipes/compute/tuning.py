# SPDX-License-Identifier: Apache-2.0
"""How a pretrained model is tuned: the options `tuning` and `lora`, checked before anything starts.

In a config file:

    tuning: {neftune_noise_alpha: 5.0, num_generations: 4}
    lora: {r: 8, lora_alpha: 16, target_modules: [q_proj, v_proj]}
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mprecipes.errors import ConfigError
from mprecipes.identity.section import read_section

ALL_LINEAR = "all-linear"
Attention = Literal["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3",
                    "flash_attention_4"]  # fmt: skip


@dataclass(frozen=True)
class TuningOptions:
    """How a pretrained model is tuned.

    Attributes:
        neftune_noise_alpha: noise added to the embeddings in training; None is none.
        label_smoothing_factor: probability spread over the whole vocabulary.
        attn_implementation: by transformers' names; "flex_attention" needs a GPU to train.
        trust_remote_code: let code that comes with model and tokenizer run.
        num_generations: held-out prompts that are answered greedily at every evaluation.
        max_new_tokens: of such an answer.
    """

    neftune_noise_alpha: float | None = None
    label_smoothing_factor: float = 0.0
    attn_implementation: Attention = "sdpa"
    trust_remote_code: bool = False
    num_generations: int = 2
    max_new_tokens: int = 48

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing_factor < 1:
            found = repr(self.label_smoothing_factor)
            raise _refused("tuning", "label_smoothing_factor", found, "0 or more, and below 1",
                           "write 0.1, or leave it out for none")  # fmt: skip
        if self.num_generations < 0:
            found = repr(self.num_generations)
            raise _refused("tuning", "num_generations", found, "0 or more", "write 0 for none")
        for name in ("neftune_noise_alpha", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise _refused("tuning", name, repr(value), "more than 0", "leave it out for none")


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters, by the names that `peft.LoraConfig` gives them.

    Attributes:
        r: rank.
        lora_alpha: the update is scaled by lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora.
        target_modules: names of the modules that get one, or none given for every linear module
            but the output head.
    """

    r: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None
    use_rslora: bool = False

    def __post_init__(self) -> None:
        if self.r < 1:
            raise _refused("lora", "r", repr(self.r), "a rank of 1 or more", "write 8 or 16")
        if not self.lora_alpha > 0:
            found = repr(self.lora_alpha)
            raise _refused("lora", "lora_alpha", found, "more than 0", "write 16 or 32")
        if not 0 <= self.lora_dropout < 1:
            raise _refused("lora", "lora_dropout", repr(self.lora_dropout), "below 1", "correct it")

    def to_peft(self) -> dict[str, Any]:
        """Gives the arguments of `peft.LoraConfig`."""
        modules = list(self.target_modules) if self.target_modules else ALL_LINEAR
        return {**dataclasses.asdict(self), "target_modules": modules, "task_type": "CAUSAL_LM"}


def tuning_options(values: Mapping[str, Any] | None) -> TuningOptions:
    """Gives the options of a mapping as it stands under `tuning`.

    Raises:
        ConfigError: an unknown name, or a value that is not what its name takes.
    """
    return read_section(TuningOptions, values, "tuning")


def lora_options(values: Mapping[str, Any] | None) -> LoraOptions:
    """Gives the options of a mapping as it stands under `lora`.

    Raises:
        ConfigError: an unknown name, or a value that is not what its name takes.
    """
    return read_section(LoraOptions, values, "lora")


def _refused(option: str, name: str, found: str, expected: str, action: str) -> ConfigError:
    return ConfigError(
        f"{name} is {found}", expected=expected, where=f"{name} in option {option}", action=action
    )
