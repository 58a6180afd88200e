"""Tensors whose elements lie far apart, further than 32 bits count, in memory that takes no room where none lies."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

FAR = (1 << 31) + 64  # elements
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def spread(values: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a copy of `values` with these strides."""
    size = 1 + sum((count - 1) * stride for count, stride in zip(values.shape, strides, strict=True))
    if values.device.type == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        whole = torch.frombuffer(mmap.mmap(-1, size * values.itemsize, flags=flags), dtype=values.dtype)
    else:
        whole = torch.empty(size, dtype=values.dtype, device=values.device)
    return whole.as_strided(values.shape, strides).copy_(values)
