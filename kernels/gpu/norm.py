"""Triton bodies of the norms: one program per row, one read and one write of it.

Statistics and products are fp32 and the result is rounded once, so half-precision rows may differ in the last bit from
a body that rounds between the two. A row's bits do not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Return the root-mean-square norm of rows of x [..., D] times weight [D] (Zhang & Sennrich, 2019).

    Rows need not lie next to each other. `out` may be x itself.
    """
    return _norm(x, None, weight, None, eps, 1.0, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0) -> Tensor:
    """Add x [T, D] times `multiplier` to `residual` [T, D] in place and return the norm of the sum."""
    return _norm(x, residual, weight, None, eps, multiplier, None)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Return the mean-and-variance norm of rows of x [..., D], with weight and bias [D]. `out` may be x itself."""
    return _norm(x, None, weight, bias, eps, 1.0, out)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, multiplier: float = 1.0
) -> Tensor:
    """Do the work of `add_rms_norm` with a layer norm."""
    return _norm(x, residual, weight, bias, eps, multiplier, None)


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    multiplier: float,
    out: Tensor | None,
) -> Tensor:
    width = x.shape[-1]
    rows = _as_rows(x)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    result_rows = _as_rows(result)
    if not rows.shape[0]:
        return result
    sums = rows if residual is None else _as_rows(residual)
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows.shape[0],)](
        rows,
        sums,
        weight,
        weight if bias is None else bias,
        result_rows,
        rows.stride(0),
        sums.stride(0),
        result_rows.stride(0),
        multiplier,
        eps,
        WIDTH=width,
        BLOCK=block,
        ADD=residual is not None,
        CENTRE=bias is not None,
        num_warps=min(16, max(1, block // 512)),
    )
    return result


def _as_rows(x: Tensor) -> Tensor:
    """Return x [..., D] as a view [T, D]; only the last dimension has to be contiguous."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    rows = x.view(-1, x.shape[-1])
    if rows.stride(1) != 1:
        raise ValueError("the normalised dimension must be contiguous")
    return rows


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    x_stride: tl.int64,
    residual_stride: tl.int64,
    out_stride: tl.int64,
    multiplier,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        place = residual + row * residual_stride + columns
        summed = tl.load(place, mask=inside, other=0.0).to(tl.float32) + values * multiplier
        # The norm reads the rounded sum, as the next layer will.
        rounded = summed.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if CENTRE:
        mean = tl.sum(values, 0) / WIDTH
        values = tl.where(inside, values - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / WIDTH + eps)
    normed = values * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTRE:
        normed += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, normed.to(out.dtype.element_ty), mask=inside)
