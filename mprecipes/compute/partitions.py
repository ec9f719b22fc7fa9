# SPDX-License-Identifier: Apache-2.0
"""Which part of which parameter a rank of a DeepSpeed engine updates, and where its gradient is.

A rank's engine holds flat partitions of masters; which range of which parameter lies where in them
is read from the addresses that DeepSpeed keeps for its own universal checkpoints (`_hp_mapping`; in
stage 3 `grad_position`), padding excluded.

Source: deepspeed 0.19, runtime/zero/stage_1_and_2.py, stage3.py, utils/tensor_fragment.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mprecipes.compute.culprits import GradientPart, clean_name
from mprecipes.compute.updates import flat_gradients, masters_of


@dataclass(frozen=True)
class Part:
    """A parameter of the optimizer, and where this rank's part of its master lies.

    Attributes:
        flat: the flat partition of its group; its optimizer state has the same layout.
        offset: of the part in `flat`.
        start, count: range of the flattened full parameter; count 0 when all is elsewhere.
        working: this rank's copy of the same range that the model computes with.
    """

    name: str
    shape: tuple[int, ...]
    flat: torch.Tensor
    offset: int
    start: int
    count: int
    working: torch.Tensor

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.detach()[self.offset : self.offset + self.count]


def parts_of(engine: Any) -> Iterator[Part]:
    """Gives where this rank's parts of all trained parameters lie, also the empty ones."""
    names = {id(tensor): clean_name(name) for name, tensor in engine.module.named_parameters()}
    zero = engine.optimizer
    if int(engine.zero_optimization_stage()) == 3:
        for group in zero.fp16_groups:
            for parameter in group:
                number, offset, _ = zero.grad_position[zero.get_param_id(parameter)]
                size = parameter.partition_numel()
                start = min(zero._get_param_partition_rank(parameter) * size, parameter.ds_numel)
                count = min(size, parameter.ds_numel - start)
                yield Part(
                    names[id(parameter)],
                    tuple(parameter.ds_shape),
                    masters_of(engine)[number],
                    offset,
                    start,
                    count,
                    parameter.ds_tensor.detach().reshape(-1)[:count],
                )
        return
    # in BF16 with FP32 accumulation DeepSpeed makes stage 1 by another class
    has_own_class = type(zero).__name__ == "BF16_Optimizer"
    groups = zero.bf16_groups if has_own_class else zero.bit16_groups
    for number, group in enumerate(groups):
        for parameter in group:
            here, offset, start, count = parameter._hp_mapping, 0, 0, 0
            if here is not None:
                offset = here.hp_fragment_address.start
                start, count = here.lp_fragment_address.start, here.lp_fragment_address.numel
            yield Part(
                names[id(parameter)],
                tuple(parameter.shape),
                masters_of(engine)[number],
                offset,
                start,
                count,
                parameter.detach().reshape(-1)[start : start + count],
            )


def gradient_parts(engine: Any) -> list[GradientPart]:
    """Gives this rank's masters and their gradients of a whole step, as they stand, unclipped."""
    flats = {id(flat): number for number, flat in enumerate(masters_of(engine))}
    found = flat_gradients(engine)
    return [
        GradientPart(
            part.name,
            len(part.shape) >= 2,
            part.of(part.flat),
            part.of(found[flats[id(part.flat)]]),
        )
        for part in parts_of(engine)
        if part.count
    ]
