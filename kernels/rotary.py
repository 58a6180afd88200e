"""Rotary position embedding (Su et al., 2021)."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotates the first R channels of x [T, H, D] by angles cos, sin [T, R/2]; a new tensor of x's dtype.

    Channel pairs are (i, i + R/2), or (2i, 2i + 1) when interleaved. Angles wider than x make the products wider too.
    """
    rotary_dim = 2 * cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    out = torch.empty_like(x)
    first_channels = slice(0, rotary_dim, 2) if interleaved else slice(0, rotary_dim // 2)
    second_channels = slice(1, rotary_dim, 2) if interleaved else slice(rotary_dim // 2, rotary_dim)
    first, second = x[..., first_channels], x[..., second_channels]
    if x.dtype == cos.dtype:
        torch.mul(first, cos, out=out[..., first_channels]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., second_channels]).addcmul_(first, sin)
    else:
        out[..., first_channels] = first * cos - second * sin
        out[..., second_channels] = second * cos + first * sin
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    return out
