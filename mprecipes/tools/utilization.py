# SPDX-License-Identifier: Apache-2.0
"""How much of its devices' arithmetic a run used: model FLOPs utilization (MFU).

The FLOPs that a model needs, of matrix products alone, over what the devices could have made in the
same time. Recomputed activations are not counted twice; norms, softmax and the optimizer not at
all. Source: A. Chowdhery et al., arXiv 2204.02311, appendix B, of which this is the formula.
"""

import contextlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mprecipes.checkpoint.manifest import Manifest, read_manifest
from mprecipes.checkpoint.pretrained import read_pretrained
from mprecipes.errors import RecipeError
from mprecipes.tools.verify import newest_checkpoint

# Dense peak, FLOP/s, by precision mode; words of a device's name, the more special names first.
# Source: NVIDIA's data sheets of each, figures without sparsity, boost clock; fp32 is that of the
# general cores, the others of the tensor cores with FP32 accumulation.
PEAK_FLOPS: dict[str, dict[str, float]] = {
    "H200 NVL": {"fp8": 1671e12, "fp16": 836e12, "bf16": 836e12, "tf32": 418e12, "fp32": 60e12},
    "H200": {"fp8": 1979e12, "fp16": 989e12, "bf16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "H100 NVL": {"fp8": 1671e12, "fp16": 836e12, "bf16": 836e12, "tf32": 418e12, "fp32": 60e12},
    "H100 PCIe": {"fp8": 1513e12, "fp16": 756e12, "bf16": 756e12, "tf32": 378e12, "fp32": 51e12},
    "H100": {"fp8": 1979e12, "fp16": 989e12, "bf16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "GH200": {"fp8": 1979e12, "fp16": 989e12, "bf16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "A100": {"fp16": 312e12, "bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    "L40S": {"fp8": 733e12, "fp16": 362e12, "bf16": 362e12, "tf32": 183e12, "fp32": 91.6e12},
}


@dataclass(frozen=True)
class ModelSize:
    """What decides how much arithmetic one position of a row costs.

    Attributes:
        trained, frozen: weights, those of an embedding that is only looked up left out.
        layers, width: of attention, all heads together; 0 where they are not known.
    """

    trained: int
    frozen: int
    layers: int
    width: int

    def flops(self, seq_length: int) -> float:
        """Gives FLOPs a position: 6 a trained weight, 4 a frozen one, 12 x layers x width x length.

        A product costs 2 forward, 2 for the gradient of its input and 2 for that of its weight,
        which a frozen one has none of. Attention is counted whole, without the causal half off.
        """
        return 6 * self.trained + 4 * self.frozen + 12 * self.layers * self.width * seq_length


def read_size(run: Path) -> ModelSize | None:
    """Reads a model's size from a run's newest checkpoint; None where there is none."""
    newest = newest_checkpoint(run)
    if newest is None:
        return None
    with contextlib.suppress(RecipeError):
        manifest = read_manifest(newest)
        trained = sum(math.prod(shape) for shape in manifest.shapes.values())
        frozen = int((manifest.raw.get("frozen") or {}).get("parameters", 0))  # under adapters
        fields = _text_config(manifest)
        looked_up = 0
        if not fields.get("tie_word_embeddings", True):
            looked_up = fields.get("vocab_size", 0) * fields.get("hidden_size", 0)
        heads, hidden = fields.get("num_attention_heads") or 1, fields.get("hidden_size") or 0
        width = heads * (fields.get("head_dim") or hidden // heads)
        layers = fields.get("num_hidden_layers") or 0
        if frozen:
            return ModelSize(trained, frozen - looked_up, layers, width)
        return ModelSize(trained - looked_up, 0, layers, width)
    return None


def _text_config(manifest: Manifest) -> dict[str, Any]:
    """Gives the fields of the model's config; {} of a checkpoint that does not keep it."""
    with contextlib.suppress(RecipeError):
        return json.loads(read_pretrained(manifest)["texts"]["config.json"])
    return {}


def peak_of(device: str, mode: str) -> float | None:
    """Gives the dense peak of a device by its name, FLOP/s; None of one that is not known."""
    words = f" {' '.join(re.findall(r'[A-Za-z0-9]+', device))} "  # an RTX A1000 is no A100
    known = next((peaks for name, peaks in PEAK_FLOPS.items() if f" {name} " in words), {})
    return known.get(mode)


def utilization(
    size: ModelSize | None,
    facts: dict[str, Any],
    *,
    mode: str,
    steps_per_second: float | None,
    tokens_per_second: float | None,
) -> float | None:
    """Gives a run's MFU; None on processors, of an unknown device, or without a checkpoint.

    Positions are those of whole rows where rows are packed. Padded rows are longer than what is
    known of them, so there targets are counted, and the result is a lower bound.

    Args:
        facts: of the run: `environment`, `topology`, `data`.
        steps_per_second, tokens_per_second: end to end.
    """
    topology, data = facts.get("topology") or {}, facts.get("data") or {}
    gpus = (facts.get("environment") or {}).get("gpus") or [""]
    peak = peak_of(str(gpus[0]), mode)
    length = data.get("seq_length")
    if topology.get("device") != "cuda" or not (peak and size and length and steps_per_second):
        return None
    positions = tokens_per_second or 0.0
    if (data.get("chat") or {}).get("batching", "packed") == "packed":
        positions = steps_per_second * (data.get("global_batch") or 0) * length
    return positions * size.flops(length) / (peak * topology.get("world_size", 1)) or None
