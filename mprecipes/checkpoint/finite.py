# SPDX-License-Identifier: Apache-2.0
"""Which tensors hold NaN or infinity, at the speed of memory."""

from collections.abc import Mapping

import torch

_FINITE_CHUNK = 1 << 24


def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Gives the names of floating-point tensors that hold NaN or infinity."""
    suspects: list[list[str]] = []
    sums: list[torch.Tensor] = []
    for names, flat in _regions(tensors):
        wide = torch.float64 if flat.itemsize == 8 else torch.float32
        for part in flat.split(_FINITE_CHUNK):
            suspects.append(names)
            sums.append(part.sum(dtype=wide))
    # A sum shows what is not finite at the speed of memory; one that overflowed is looked at again.
    values = torch.stack([value.double() for value in sums]).isfinite().tolist() if sums else []
    looked_at = {name for names, fine in zip(suspects, values) if not fine for name in names}
    return [
        name
        for name in tensors
        if name in looked_at and not _wide_enough(tensors[name]).isfinite().all()
    ]


def _regions(tensors: Mapping[str, torch.Tensor]) -> list[tuple[list[str], torch.Tensor]]:
    """Floating-point values as flat tensors with the names in them; neighbours in memory as one."""
    flat = {
        name: _wide_enough(tensor).detach().reshape(-1)
        for name, tensor in tensors.items()
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex())
    }
    regions: list[tuple[list[str], torch.Tensor]] = []
    for name in sorted(flat, key=lambda name: flat[name].data_ptr()):
        this = flat[name]
        if regions:
            names, last = regions[-1]
            if (
                last.dtype == this.dtype
                and last.data_ptr() + last.nbytes == this.data_ptr()
                and last.untyped_storage().data_ptr() == this.untyped_storage().data_ptr()
            ):
                names.append(name)
                joined = last.as_strided((len(last) + len(this),), (1,), last.storage_offset())
                regions[-1] = (names, joined)
                continue
        regions.append(([name], this))
    return regions


def _wide_enough(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.itemsize == 1 else tensor  # float8 has no reductions
