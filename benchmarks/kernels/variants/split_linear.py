"""A residual sum, its norm and a projection of few rows in two launches: a variant that serves nothing yet.

Each program multiplies a block of columns over a part of the depth. It makes sum and norm of its rows anew in its
prologue, which reads the rows alone; a second launch adds the parts, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 16
_SPLITS = 4
_BLOCK_N, _BLOCK_K = 64, 128
_ADDED_AT_ONCE = 1024


def add_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, splits: int = _SPLITS
) -> tuple[Tensor, Tensor]:
    """Return x + residual [M, K] and the product [M, N] of its RMS norm with weight [N, K]. M is at most `FEW_ROWS`.

    Raise ValueError for more rows.
    """
    num_rows, depth = x.shape
    width = len(weight)
    if num_rows > FEW_ROWS:
        raise ValueError(f"{num_rows} rows are more than {FEW_ROWS}")
    summed = torch.empty_like(x, memory_format=torch.contiguous_format)
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if not num_rows:
        return summed, out
    parts = torch.empty((splits, num_rows, width), dtype=torch.float32, device=x.device)
    _part_kernel[(triton.cdiv(width, _BLOCK_N), splits)](
        x,
        residual,
        norm_weight,
        weight,
        summed,
        parts,
        num_rows,
        x.stride(0),
        residual.stride(0),
        weight.stride(0),
        eps,
        K=depth,
        N=width,
        STEPS=triton.cdiv(triton.cdiv(depth, _BLOCK_K), splits),
        BLOCK_M=FEW_ROWS,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        num_warps=4,
        num_stages=4,
    )
    block = min(_ADDED_AT_ONCE, triton.next_power_of_2(width))
    _add_kernel[(num_rows, triton.cdiv(width, block))](
        parts, out, num_rows, N=width, SPLITS=splits, BLOCK=block, num_warps=4
    )
    return summed, out


@triton.jit(do_not_specialize=["num_rows"])
def _part_kernel(
    x,
    residual,
    norm_weight,
    weight,
    summed,
    parts,
    num_rows,
    stride_x: tl.int64,
    stride_residual: tl.int64,
    stride_weight: tl.int64,
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.arange(0, BLOCK_M)
    inside = (row < num_rows)[:, None]
    of_x, of_residual = x + row[:, None] * stride_x, residual + row[:, None] * stride_residual
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for first in range(0, K, BLOCK_K):
        added = _sum_of(of_x, of_residual, first + tl.arange(0, BLOCK_K), inside, K).to(tl.float32)
        squares += added * added
    scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / K + eps)
    column, part = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    weight_row = tl.minimum(column, N - 1).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, STEPS):
        k = (part * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        added = _sum_of(of_x, of_residual, k, inside, K)
        tl.store(
            summed + row[:, None] * K + k[None, :], added, mask=inside & (k < K)[None, :] & (tl.program_id(0) == 0)
        )
        normed = added.to(tl.float32) * scale[:, None] * tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
        w = tl.load(weight + weight_row[None, :] * stride_weight + k[:, None], mask=(k < K)[:, None], other=0.0)
        acc = tl.dot(normed.to(w.dtype), w, acc, input_precision="ieee")
    places = parts + (part * num_rows + row[:, None]) * N + column[None, :]
    tl.store(places, acc, mask=inside & (column < N)[None, :])


@triton.jit
def _sum_of(of_x, of_residual, k, inside, K: tl.constexpr):
    """Return x + residual at columns k, rounded as the residual stream is, 0 outside."""
    mask = inside & (k < K)[None, :]
    values = tl.load(of_x + k[None, :], mask=mask, other=0.0)
    others = tl.load(of_residual + k[None, :], mask=mask, other=0.0)
    return (values.to(tl.float32) + others.to(tl.float32)).to(values.dtype)


@triton.jit(do_not_specialize=["num_rows"])
def _add_kernel(parts, out, num_rows, N: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + (part * num_rows + row) * N + column, mask=column < N, other=0.0)
    tl.store(out + row * N + column, total.to(out.dtype.element_ty), mask=column < N)
