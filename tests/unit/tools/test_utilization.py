# SPDX-License-Identifier: Apache-2.0
"""How much of a device's arithmetic a run used, against numbers computed by hand."""

import json
from dataclasses import replace

import pytest

from mprecipes.tools.run_records import read_record
from mprecipes.tools.utilization import ModelSize, peak_of, read_size, utilization
from tests.made_runs import make_run

SIZE = ModelSize(trained=1_000_000, frozen=0, layers=2, width=64)
FACTS = {
    "environment": {"gpus": ["NVIDIA H100 80GB HBM3"]},
    "topology": {"device": "cuda", "world_size": 2},
    "data": {"seq_length": 128, "global_batch": 8},
}


def test_flops_of_a_position():
    """6 a weight and 12 x 2 layers x 64 x 128 for attention; 4 for a weight that is frozen."""
    assert SIZE.flops(128) == 6_000_000 + 196_608
    assert ModelSize(10, 1000, 0, 0).flops(128) == 60 + 4000


@pytest.mark.parametrize(
    ("device", "mode", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "fp8", 1671e12),
        ("NVIDIA H200", "fp8", 1979e12),
        ("NVIDIA GH200 480GB", "tf32", 494e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "fp8", None),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156e12),
        ("NVIDIA H200 NVL", "bf16", 836e12),
        ("NVIDIA L40S", "fp16", 362e12),
        ("NVIDIA RTX A1000 Laptop GPU", "bf16", None),
        ("NVIDIA RTX A1000", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA A10", "bf16", None),
        ("NVIDIA L4", "bf16", None),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA H20", "bf16", None),
        ("Some Other Device", "bf16", None),
        ("", "bf16", None),
    ],
)
def test_peaks_of_devices_by_name(device, mode, peak):
    """The most special name counts, by whole words; a mode without units, and others, are None."""
    assert peak_of(device, mode) == peak


def rates(facts=FACTS, size=SIZE, mode="bf16"):
    return utilization(size, facts, mode=mode, steps_per_second=50.0, tokens_per_second=40_000.0)


def test_whole_rows_are_counted_where_they_are_packed():
    """50 steps of 8 x 128 positions, over two H100 in BF16; a mask on targets changes nothing."""
    assert rates() == pytest.approx(50 * 8 * 128 * 6_196_608 / (2 * 989e12))
    chats = {**FACTS, "data": {**FACTS["data"], "chat": {"batching": "packed"}}}
    assert rates(chats) == rates()


def test_padded_rows_count_by_their_targets():
    """A lower bound: 40,000 targets a second."""
    padded = {**FACTS, "data": {**FACTS["data"], "chat": {"batching": "grouped"}}}
    assert rates(padded) == pytest.approx(40_000 * 6_196_608 / (2 * 989e12))


@pytest.mark.parametrize(
    "changed",
    [
        {"topology": {"device": "cpu", "world_size": 1}},
        {"environment": {"gpus": ["Some Other Device"]}},
        {"environment": None},
        {"data": {"global_batch": 8}},
    ],
)
def test_what_is_not_known_gives_none(changed):
    """A processor, an unknown device, and runs that did not record what is needed."""
    assert rates({**FACTS, **changed}) is None
    assert rates(size=None) is None


def test_a_run_gives_what_was_measured(tmp_path):
    """Steps a second come from the journal: 1,000,000 tokens/s at 2040 a step."""
    run = read_record(make_run(tmp_path / "run", mode="bf16", tokens_per_second=1e6))
    assert run.utilization is None and run.size is None
    found = replace(run, facts={**run.facts, **FACTS}, size=SIZE).utilization
    assert found == pytest.approx(1e6 / 2040 * 8 * 128 * 6_196_608 / (2 * 989e12))


def test_the_size_of_a_model_is_read_from_its_checkpoint(tmp_path, folders, monkeypatch):
    """Weights from the manifest, an embedding that is only looked up left out; frozen ones too."""
    from mprecipes.tools import utilization as module

    run = folders.run(tmp_path / "run", [(1, 4)], [4])
    assert read_size(run) == ModelSize(6, 0, 0, 0)  # it keeps no config: attention is left out
    fields = {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 2, "vocab_size": 2,
              "tie_word_embeddings": False, "head_dim": 8}  # fmt: skip
    kept = {"texts": {"config.json": json.dumps(fields)}}
    monkeypatch.setattr(module, "read_pretrained", lambda manifest: kept)
    assert read_size(run) == ModelSize(2, 0, 3, 16)
    real = module.read_manifest
    monkeypatch.setattr(
        module, "read_manifest",
        lambda folder: replace(real(folder), raw={"frozen": {"parameters": 100}}),
    )  # fmt: skip
    assert read_size(run) == ModelSize(6, 96, 3, 16)
    assert read_size(tmp_path / "nothing") is None
