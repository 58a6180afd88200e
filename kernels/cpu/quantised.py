"""Quantised weights for the compiled kernels: rounding matrices to rows of blocks, and packing those into panels."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.library import NativeKernels
from kernels.cpu.panels import PANEL_COLUMNS, columns_of_rows, empty_bytes
from kernels.weight_formats import Q4_1, Q4_K, Q5_1, Q5_K, Q6_K, Q8_0, QuantizedRows, WeightFormat

_ROUNDED_TO = (Q8_0, Q4_1, Q5_1, Q4_K, Q5_K, Q6_K)


def quantise(weight: Tensor, form: WeightFormat, kernels: NativeKernels) -> QuantizedRows:
    """Round weight [N, K] of any float dtype to rows of blocks.

    Choose scales, and minima where the format has them, by the least squared error among several candidates. Raise
    ValueError for a format that only files have, and unless K is whole blocks.
    """
    if form not in _ROUNDED_TO:
        raise ValueError(f"weights are rounded to {', '.join(form.name for form in _ROUNDED_TO)}, not to {form.name}")
    narrow = weight.dtype == torch.bfloat16
    numbers = weight if narrow else weight.float()
    if numbers.stride(1) != 1:
        numbers = numbers.contiguous()
    num_rows, depth = numbers.shape
    out = torch.empty((num_rows, form.row_bytes(depth)), dtype=torch.uint8)
    kernels.quantise(numbers.data_ptr(), narrow, numbers.stride(0), num_rows, depth, form.number, out.data_ptr())
    return QuantizedRows(form, out, depth)


def packed_bytes(form: WeightFormat, num_columns: int, depth: int) -> int:
    """Return the bytes of a packed [num_columns, depth] matrix. Raise ValueError unless `depth` is whole blocks."""
    form.row_bytes(depth)
    return -(-num_columns // PANEL_COLUMNS) * PANEL_COLUMNS * (depth // form.block) * form.packed_bytes


def pack_rows(
    rows: QuantizedRows, kernels: NativeKernels, order: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Pack rows into panels, uint8 [packed_bytes]. Every weight keeps its value.

    order: [columns] int64, the row of each column of the panels, -1 for zeros, a multiple of 32 of them; by default the
    rows as they are. out: the bytes to write; raise ValueError if they are not as many.
    """
    num_rows, depth = rows.shape
    if order is None:
        order = columns_of_rows(num_rows)
    pieces = [piece if piece.stride(1) == 1 else piece.contiguous() for piece in rows.pieces]
    starts = [piece.data_ptr() + piece.stride(0) * torch.arange(len(piece)) for piece in pieces]
    # -1 takes the address that is last.
    columns = torch.cat([*starts, torch.zeros(1, dtype=torch.int64)])[order]
    num_bytes = packed_bytes(rows.format, len(order), depth)
    out = empty_bytes(num_bytes) if out is None else out
    if out.numel() != num_bytes:
        raise ValueError(f"a matrix of {num_rows} x {depth} does not go into {out.numel()} bytes")
    kernels.pack_quantised(rows.format.number, columns.data_ptr(), depth, len(columns), out.data_ptr())
    return out
