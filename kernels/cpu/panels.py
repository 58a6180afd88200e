"""Weights in the layout of the compiled kernels: panels of 32 output columns, depth after depth (see `panels.h`)."""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.library import NativeKernels
from kernels.weight_formats import FP8_FORMATS, WeightFormat

LANES = 16
PANEL_COLUMNS = 2 * LANES
# Numbers of packings in matrix.h: that of the first format of quantised weights, and the number that is added to a
# format's if rows are rounded to bfloat16.
FIRST_FORMAT = 3
_OF_PAIRS = 64


class MatrixRecord(Structure):
    """`Matrix` of matrix.h."""

    _fields_ = [
        ("panels", c_void_p),
        ("packing", c_int64),
        ("times", c_int64),
        ("depth", c_int64),
        ("width", c_int64),
        ("bias", c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class PanelMatrix:
    """A weight [width, depth] in panels, uint8 [bytes], and its bias, float32 [width].

    packing: its number in matrix.h. times: how often rows are rounded for quantised weights; 0 leaves them floats.
    """

    data: Tensor
    packing: int
    depth: int
    width: int
    bias: Tensor | None = None
    times: int = 1

    @property
    def record(self) -> MatrixRecord:
        """Return the record that the compiled kernels read; it does not keep the tensors alive."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return MatrixRecord(self.data.data_ptr(), self.packing, self.times, self.depth, self.width, bias)


def linear_kind(is_bf16: bool, narrow_rows: bool) -> int:
    """Return the packing of numbers in matrix.h. narrow_rows: round rows to bfloat16 for weights of bfloat16."""
    return is_bf16 + (is_bf16 and narrow_rows)


def quantised_kind(form: WeightFormat, narrow_rows: bool) -> int:
    """Return the packing of a format in matrix.h. narrow_rows: round rows to bfloat16 for floats of 8 bits."""
    return FIRST_FORMAT + form.number + (_OF_PAIRS if narrow_rows and form in FP8_FORMATS else 0)


def empty_bytes(size: int) -> Tensor:
    """Return uint8 [size] of any contents."""
    return torch.empty(size, dtype=torch.uint8)


def panel_elements(num_columns: int, depth: int) -> int:
    """Return the number of elements of a packed [num_columns, depth] weight."""
    return -(-num_columns // PANEL_COLUMNS) * PANEL_COLUMNS * depth


def pack_panels(
    weight: Tensor, kernels: NativeKernels, order: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Pack weight [N, K], bfloat16 or float32, into uint8 [bytes].

    order: [columns] int64, the row of each column of the panels, -1 for zeros, a multiple of 32 of them; by default the
    rows as they are. In bfloat16 the columns (j, 16 + j) are the halves of one word. out: the bytes to write; raise
    ValueError if they are not as many.
    """
    num_rows, depth = weight.shape
    if order is None:
        order = columns_of_rows(num_rows)
    rows = weight if weight.stride(1) == 1 else weight.contiguous()
    num_bytes = len(order) * depth * weight.itemsize
    out = empty_bytes(num_bytes) if out is None else out
    if out.numel() != num_bytes:
        raise ValueError(f"a matrix of {num_rows} x {depth} does not go into {out.numel()} bytes")
    narrow = weight.dtype == torch.bfloat16
    kernels.pack_panels(rows.data_ptr(), narrow, rows.stride(0), depth, order.data_ptr(), len(order), out.data_ptr())
    return out


def columns_of_rows(num_rows: int) -> Tensor:
    """Return the row of each column of panels, int64, -1 for columns beyond them."""
    order = torch.arange(-(-num_rows // PANEL_COLUMNS) * PANEL_COLUMNS)
    order[num_rows:] = -1
    return order


def gate_beside_up(gate_up: Tensor) -> Tensor:
    """Order rows [2I, ...] (gate first) so that a panel has 16 gate columns beside their 16 up columns, zero-padded."""
    gate, up = gate_up.view(2, -1, *gate_up.shape[1:])
    missing = -gate.shape[0] % LANES
    if missing:
        padding = gate.new_zeros((missing, *gate.shape[1:]))
        gate, up = torch.cat([gate, padding]), torch.cat([up, padding])
    groups = torch.stack([half.reshape(-1, LANES, *gate.shape[1:]) for half in (gate, up)], 1)
    return groups.flatten(0, 2)
