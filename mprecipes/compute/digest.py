# SPDX-License-Identifier: Apache-2.0
"""A digest of tensors that any split adds up to: 64 bits that say they are what they were.

Linear in the bytes of the state. A parameter's little-endian bytes are cut into rows of 2048; each
row is multiplied with a fixed matrix of small odd numbers, which is exact in integers and at the
speed of the matrix units; its 16 sums are folded with a 64-bit key of the row's number and the
parameter's name, and all is added modulo 2^64. Any split of a tensor adds up to the digest of the
whole, and any device and world size gives the same number. A changed byte, a change of many signs
or a swap goes unseen with a probability below 2^-56. Against faults, not against people. Measured
on one core: 8 GB/s, where a 64-bit mix of each element made 0.4 GB/s.
"""

import functools
import hashlib
from collections.abc import Iterable, Iterator

import torch

from mprecipes.compute.mix import mix64_, signed64

ROW = 2048  # bytes; with 7-bit numbers a row's sums stay below 2^24, exact in float32 too
_COLUMNS = 16
_FEW_ROWS, _MANY_ROWS = 64, 1 << 16  # a piece of 128 KiB is short; 128 MiB are one product
_GATHERED_ROWS = 1 << 12
_GOLDEN = 0x9E3779B97F4A7C15


def sum_digest(parts: Iterable[tuple[torch.Tensor, str, int]]) -> int:
    """The sum over parts (tensor, name, offset of its first element in the full parameter).

    In few, large operations: between them a background thread takes the interpreter's lock from the
    training.
    """
    total = 0
    small: list[tuple[torch.Tensor, int, int, int]] = []  # bytes, zeros before, first row, key
    large: list[tuple[torch.Tensor, int]] = []  # rows, their first key
    for tensor, name, offset in parts:
        data = tensor.detach().reshape(-1).view(torch.int8)
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        total += data.numel() * (key | 1)  # so that a longer tail of zeros shows
        row, before = divmod(offset * tensor.itemsize, ROW)
        if data.numel() <= _FEW_ROWS * ROW:
            small.append((data, before, row, key))
            continue
        if before:
            small.append((data[: ROW - before], before, row, key))
            data, row = data[ROW - before :], row + 1
        num_rows, rest = divmod(data.numel(), ROW)
        if rest:
            small.append((data[num_rows * ROW :], 0, row + num_rows, key))
        rows = data[: num_rows * ROW].view(-1, ROW)
        for start in range(0, num_rows, _MANY_ROWS):
            part = rows[start : start + _MANY_ROWS]
            large.append((part, key + (row + start) * _GOLDEN))
    return (total + _rows_digest(large) + _rows_digest(_gathered(small))) % (1 << 64)


def _gathered(
    small: list[tuple[torch.Tensor, int, int, int]],
) -> Iterator[tuple[torch.Tensor, int]]:
    """Copies short pieces into rows of their own; the zeros around a piece add nothing."""
    spans = [-(-(before + data.numel()) // ROW) for data, before, _, _ in small]
    while small:
        count, size = 0, 0
        while count < len(small) and size < _GATHERED_ROWS:
            size, count = size + spans[count], count + 1
        flat = torch.zeros(size * ROW, dtype=torch.int8, device=small[0][0].device)
        rows, start = flat.view(-1, ROW), 0
        for (data, before, row, key), span in zip(small[:count], spans[:count]):
            begin = start * ROW + before
            flat[begin : begin + data.numel()] = data
            yield rows[start : start + span], key + row * _GOLDEN
            start += span
        small, spans = small[count:], spans[count:]


def _rows_digest(parts: Iterable[tuple[torch.Tensor, int]]) -> int:
    """The sum over parts (rows, key of the first one; the next row's is _GOLDEN more)."""
    total, size = 0, 0
    waiting: list[tuple[torch.Tensor, int]] = []
    for part in parts:
        if waiting and size + len(part[0]) > _MANY_ROWS:
            total, size, waiting = total + _fold(waiting), 0, []
        waiting.append(part)
        size += len(part[0])
    return total + _fold(waiting)


def _fold(parts: list[tuple[torch.Tensor, int]]) -> int:
    if not parts:
        return 0
    device = parts[0][0].device
    sums = torch.cat([_row_sums(rows) for rows in _joined([rows for rows, _ in parts])])
    lengths = torch.tensor([len(rows) for rows, _ in parts])
    starts = lengths.cumsum(0) - lengths
    first = torch.tensor([signed64(key) for _, key in parts]) - starts * signed64(_GOLDEN)
    keys = torch.arange(len(sums)).mul_(signed64(_GOLDEN)).add_(first.repeat_interleave(lengths))
    folded = sums.to(torch.int64).mul_(_factors(device)[1]).sum(dim=1)
    return int(folded.mul_(mix64_(keys.to(device)).bitwise_or_(1)).sum())


def _joined(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rows that follow each other in one memory as one tensor."""
    joined: list[torch.Tensor] = []
    for rows in parts:
        last = joined[-1] if joined else rows[:0]
        if (
            joined
            and last.data_ptr() + last.nbytes == rows.data_ptr()
            and last.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
        ):
            joined[-1] = last.as_strided((len(last) + len(rows), ROW), (ROW, 1))
        else:
            joined.append(rows)
    return joined


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """The exact product of bytes (rows, ROW) and the matrix: (rows, columns)."""
    matrix, _ = _factors(rows.device)
    if rows.device.type == "cpu" and _integer_product_is_exact():
        return torch._int_mm(rows, matrix)
    # products and sums are integers below 2^24: exact in float32, also from TF32 or BF16 inputs
    with torch.autocast(rows.device.type, enabled=False):
        factors, at_once = matrix.float(), _MANY_ROWS if rows.is_cuda else _FEW_ROWS
        return torch.cat([part.float() @ factors for part in rows.split(at_once)])


@functools.cache
def _factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix (ROW, columns) of odd numbers in -63 .. 63, and the 64-bit odd factors of columns.

    7 bits, because processors without VNNI add pairs of 8-bit products in 16 bits.
    Source: oneDNN documentation, "Nuances of int8 Computations".
    """
    numbers = mix64_(torch.arange(1, (ROW + 1) * _COLUMNS + 1).mul_(signed64(_GOLDEN)))
    matrix, columns = numbers[: ROW * _COLUMNS], numbers[ROW * _COLUMNS :]
    matrix = (matrix.bitwise_and_(63) * 2 - 63).to(torch.int8).view(ROW, _COLUMNS)
    return matrix.to(device), (columns | 1).to(device)


@functools.cache
def _integer_product_is_exact() -> bool:
    """Whether this processor's 8-bit matrix product gives what integers give, at the extremes."""
    matrix, _ = _factors(torch.device("cpu"))
    signs = torch.where(matrix[:, 0] < 0, -128, 127)
    for num_rows in (1, 64):
        rows = torch.stack([signs, -1 - signs]).repeat(num_rows, 1).to(torch.int8)
        try:
            found = torch._int_mm(rows, matrix)
        except (RuntimeError, NotImplementedError):
            return False
        if not torch.equal(found.long(), rows.long() @ matrix.long()):
            return False
    return True
