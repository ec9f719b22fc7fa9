# SPDX-License-Identifier: Apache-2.0
"""A Llama of a few thousand parameters, and any change of it."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.fix64 import MODEL


def tiny_llama(**changed):
    """Gives the model of FIX-64, without dropout unless asked for, from seed 0."""
    torch.manual_seed(0)
    fields = {**MODEL, "attention_dropout": 0.0, **changed}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).float()


def tokens(rows=2, length=8):
    return torch.arange(rows * length).reshape(rows, length) % 257
