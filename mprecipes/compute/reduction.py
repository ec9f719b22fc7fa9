# SPDX-License-Identifier: Apache-2.0
"""The dtype in which DDP sums gradients over processes: `reduce_dtype`, and the proof.

torch's own 16-bit hooks refuse BF16 over gloo by name; this one sums on any backend and notes what
went over it. Gradients are divided before they are summed, so that FP16 does not overflow from the
number of processes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mprecipes.compute.precision import REDUCE_DTYPES
from mprecipes.errors import ConfigError


class GradientReduction:
    """How the gradients of one prepared model are summed.

    Args:
        model: of `Accelerator.prepare`; DDP is given a hook unless it sums in FP32.
        wanted: "fp32", "bf16" or "fp16".

    Attributes:
        seen: dtypes that went between processes, such as "bfloat16".
    """

    def __init__(self, model: torch.nn.Module, wanted: str) -> None:
        self.seen: set[str] = set()
        self._wanted, self._model = REDUCE_DTYPES[wanted], model
        if isinstance(model, DistributedDataParallel) and wanted != "fp32":
            model.register_comm_hook(state=None, hook=self._sum)

    def verify(self) -> None:
        """Refuses a step whose gradients were summed in another dtype; call it after backward.

        Raises:
            ConfigError: naming what was seen.
        """
        if not isinstance(self._model, DistributedDataParallel):
            return
        if self._wanted == "float32":  # torch's own path sums gradients as they are
            grads = (p.grad for p in self._model.parameters() if p.grad is not None)
            self.seen = {str(grad.dtype).removeprefix("torch.") for grad in grads}
        if self.seen != {self._wanted}:
            raise ConfigError(
                f"gradients were summed in {', '.join(sorted(self.seen)) or 'nothing'}",
                expected=self._wanted,
                where="reduce_dtype in option numerics",
                action="report this together with `mprecipes env`",
            )

    def _sum(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        whole = bucket.buffer()
        sent = whole.to(getattr(torch, self._wanted)).div_(dist.get_world_size())
        self.seen.add(str(sent.dtype).removeprefix("torch."))
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None

        def back(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            return whole.copy_(done.value()[0])

        return work.get_future().then(back)
