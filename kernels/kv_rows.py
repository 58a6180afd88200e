"""Rows of keys and values as pools keep them: float32, bfloat16, or 8-bit integers beside their scale.

A row of int8 is [dim] integers and the 4 bytes of a float32 scale, so it is `dim + SCALE_BYTES` wide. Copies, tiers and
files of blocks move rows and do not know their numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
# The dtypes of pools that the compiled kernels know, as numbers of `Kind` in cpu/kv_rows.h.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_LARGEST = 127.0


def row_width(dim: int, dtype: torch.dtype) -> int:
    """Return the elements of a pool's row of `dim` numbers; 0 for 0."""
    return dim + SCALE_BYTES if dim and dtype == torch.int8 else dim


def pack_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Round rows [..., D] to [..., row_width] of `dtype`, the nearest numbers; for int8 a row's largest becomes 127."""
    if dtype != torch.int8:
        return rows.to(dtype)
    wide = rows.float()
    scales = wide.abs().amax(-1, keepdim=True) / _LARGEST
    integers = (wide / torch.where(scales == 0, 1.0, scales)).round_().to(torch.int8)
    return torch.cat([integers, scales.view(torch.int8)], -1)


def unpack_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [..., D] of a pool's rows, in `dtype`."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    dim = rows.shape[-1] - SCALE_BYTES
    scales = rows[..., dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (rows[..., :dim].float() * scales).to(dtype)
