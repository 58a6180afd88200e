"""Expanding FP8 weights with one scale per block of rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor


def dequantise_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Multiply every block of ``block`` = (rows, columns) numbers by its scale.

    weight: [..., N, K] float8_e4m3fn; scale: [..., ceil(N / rows), ceil(K / columns)], fp32 or a power of two in
    float8_e8m0fnu. Returns [..., N, K] of ``dtype``. Works a band of rows at a time, in fp32.
    """
    rows, columns = block
    out = torch.empty(weight.shape, dtype=dtype)
    wide = scale.float().repeat_interleave(columns, dim=-1)[..., : weight.shape[-1]]
    for band in range(scale.shape[-2]):
        where = (..., slice(band * rows, (band + 1) * rows), slice(None))
        out[where] = (weight[where].float() * wide[..., band : band + 1, :]).to(dtype)
    return out
