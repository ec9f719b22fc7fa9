# SPDX-License-Identifier: Apache-2.0
"""The file of adapters: names as peft reads them, values from any order of pieces."""

import pytest
import torch
from safetensors.torch import load_file

from mprecipes.checkpoint.adapter_file import FILE, AdapterWriter, name_in_file, read_adapter

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"


@pytest.mark.parametrize(
    ("name", "right"),
    [
        (A, "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        ("x.lora_embedding_A.default", "x.lora_embedding_A"),
        ("x.lora_magnitude_vector.default.weight", "x.lora_magnitude_vector"),
        ("model.default.lora_B.default.weight", "model.default.lora_B.weight"),
        ("model.default.weight", "model.default.weight"),
    ],
)
def test_names_lose_that_of_the_adapter(name, right):
    """And no other part that is called default."""
    assert name_in_file(name) == right


def test_peft_writes_the_same_names():
    """For every weight of a model with adapters on all linear modules."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    from tests.exporting import tiny

    model = get_peft_model(tiny(), LoraConfig(r=2, target_modules="all-linear", use_dora=True))
    ours = {name_in_file(n) for n, p in model.named_parameters() if p.requires_grad}
    assert ours == set(get_peft_model_state_dict(model)) != set()


def test_pieces_in_any_order(tmp_path):
    """Two halves, the later one first, in the dtype asked for; nothing is there after an error."""
    values = torch.arange(6.0).reshape(2, 3)
    with AdapterWriter(tmp_path, {A: torch.bfloat16}, {A: [2, 3]}) as writer:
        writer.write(A, 3, values.view(-1)[3:])
        writer.write(A, 0, values.view(-1)[:3])
    assert list(load_file(tmp_path / FILE)) == [name_in_file(A)]
    assert torch.equal(read_adapter(tmp_path, [A])[A], values.bfloat16())
    (tmp_path / "failed").mkdir()
    with pytest.raises(RuntimeError):
        with AdapterWriter(tmp_path / "failed", {A: torch.float32}, {A: [2, 3]}):
            raise RuntimeError
    assert not (tmp_path / "failed" / FILE).exists()
