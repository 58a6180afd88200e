"""Matrix products with quantised weights on a GPU, and rows of quantised tables: unpacked in registers.

For one tile a row of the result has the same bits in any batch; steps of up to 16 rows have another tile than larger
ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.moe_config import Tile
from kernels.gpu.moe_kernels import tile_and_block
from kernels.gpu.packed_rows import PackedForm, look_up_packed, multiply_packed, pack_rows, packed_form
from kernels.linear import Linear
from kernels.weight_formats import QuantizedRows

FEW_ROWS = 16
# For few rows many programs with steps in flight; for many rows large products. Steps follow from the format.
_FEW, _MANY = Tile(32, 0, 4, 4, 4), Tile(128, 0, 8, 8, 2)
_FEW_FP32, _MANY_FP32 = Tile(64, 0, 4, 4, 2), Tile(64, 0, 8, 4, 2)


class PackedLinear(Linear):
    """x [M, K] -> [M, N] with a weight [N, K] in the bits of its checkpoint, and a bias [N] or None.

    fp8_products: see `kernels.gpu.moe_config.WeightStorage`.
    """

    def __init__(
        self,
        rows: QuantizedRows,
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8_products: bool = False,
    ) -> None:
        num_rows, depth = rows.shape
        self._form, self._dtype = packed_form(rows.format, depth, fp8_products=fp8_products), dtype
        self._rows = pack_rows(rows, device)
        self._bias = None if bias is None else bias.to(device, dtype)
        self._order = None if rows.order is None else rows.order.to(device)
        super().__init__(num_rows, depth, self._rows.numel())

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self._order is None else x.index_select(1, self._order)
        return multiply_rows(x, self._rows, self._form, self._bias, self._dtype)


class PackedTable:
    """Rows of a table [N, K] by their numbers, unpacked."""

    def __init__(self, table: QuantizedRows, dtype: torch.dtype, device: torch.device) -> None:
        self._form, self._dtype, self._rows = packed_form(table.format, table.depth), dtype, pack_rows(table, device)
        self._columns = None if table.order is None else table.order.argsort().to(device)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> [T, K], a new tensor."""
        found = look_up_packed(self._rows, self._form, ids, self._dtype)
        return found if self._columns is None else found.index_select(1, self._columns)


def multiply_rows(x: Tensor, weight: Tensor, form: PackedForm, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply x [M, K] of `dtype`, rows contiguous, with packed rows [N, row_bytes]: [M, N], a new tensor."""
    num_rows, width = len(x), len(weight)
    out = torch.empty((num_rows, width), dtype=dtype, device=x.device)
    if not num_rows:
        return out
    block_m, tile = tile_of(num_rows, dtype)
    tiles = triton.cdiv(num_rows, block_m)
    _linear_kernel[(tiles * triton.cdiv(width, tile.block_n),)](
        x,
        weight,
        out if bias is None else bias,
        out,
        num_rows,
        tiles,
        x.stride(0),
        N=width,
        FORM=form,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def tile_of(num_rows: int, dtype: torch.dtype) -> tuple[int, Tile]:
    """Return the rows of a tile and its other sizes for a product with a number of rows."""
    few = num_rows <= FEW_ROWS
    if dtype == torch.float32:
        return (16, _FEW_FP32) if few else (32, _MANY_FP32)
    return (16, _FEW) if few else (64, _MANY)


@triton.jit(do_not_specialize=["num_rows", "tiles"])
def _linear_kernel(
    x,
    w,
    bias,
    out,
    num_rows,
    tiles,
    stride_x: tl.int64,
    N: tl.constexpr,
    FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile, block = tile_and_block(tl.program_id(0), tiles, tl.cdiv(N, BLOCK_N), GROUP_M)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = tl.minimum(column, N - 1)
    rows = w + weight_row.to(tl.int64) * FORM.row_bytes
    a_rows = x + tl.minimum(row, num_rows - 1).to(tl.int64) * stride_x
    acc, _ = multiply_packed(a_rows, rows, rows, FORM, False, BLOCK_M, BLOCK_N)
    if HAS_BIAS:
        acc += tl.load(bias + weight_row).to(tl.float32)[None, :]
    places = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=(row[:, None] < num_rows) & (column[None, :] < N))
