"""Expanding MXFP4 weights (OCP Microscaling Formats 1.0): blocks of 32 four-bit floats with one shared exponent."""

from __future__ import annotations

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


def dequantise_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Expand one matrix.

    blocks: [R, G, 16] uint8, two values per byte with the earlier in the low half; scales: [R, G] uint8 exponents.
    Returns [R, 32 G] of ``dtype``; exact in bfloat16 and float32.
    """
    values = torch.tensor(_MAGNITUDES + tuple(-value for value in _MAGNITUDES))
    codes = torch.arange(256)
    pairs = torch.stack([values[codes & 15], values[codes >> 4]], -1)
    expanded = pairs[blocks.int()].flatten(-2)
    expanded = torch.ldexp(expanded, (scales.int() - _EXPONENT_BIAS).unsqueeze(-1))
    return expanded.flatten(-2).to(dtype)
