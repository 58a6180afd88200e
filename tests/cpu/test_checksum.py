"""The CRC-32 of the compiled kernels."""

from __future__ import annotations

import zlib
from random import Random

import pytest

from kernels.cpu.checksum import fastest_crc32
from kernels.cpu.library import native_kernels

KERNELS = native_kernels()


@pytest.mark.skipif(KERNELS is None, reason="needs a C++ compiler")
def test_the_compiled_crc32_is_that_of_zlib_for_every_length_start_and_alignment() -> None:
    assert KERNELS is not None
    draw = Random(1)
    data = bytearray(draw.randbytes(5000))
    compiled = fastest_crc32(KERNELS)
    for length in (*range(200), *(draw.randrange(200, 4000) for _ in range(200))):
        first, start = draw.randrange(1000), draw.choice((0, draw.getrandbits(32)))
        part = memoryview(data)[first : first + length]
        assert compiled(part, start) == zlib.crc32(part, start)


def test_without_compiled_kernels_zlib_computes() -> None:
    assert fastest_crc32(None) is zlib.crc32
