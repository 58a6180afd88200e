"""The CRC-32 of zlib, of large runs of bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np

from kernels.cpu.library import NativeKernels


def fastest_crc32(kernels: NativeKernels | None) -> Callable[[memoryview, int], int]:
    """Return a function that computes the CRC-32 of bytes behind others with a CRC-32, as `zlib.crc32` does."""
    if kernels is None or not kernels.multiplies_bits:
        return zlib.crc32
    compiled = kernels.crc32

    def crc32(data: memoryview, start: int) -> int:
        return compiled(np.frombuffer(data, np.uint8).ctypes.data, len(data), start)

    return crc32
