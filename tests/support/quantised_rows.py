"""Random quantised weights of every format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.weight_formats import (
    FP8,
    FP8_BLOCK,
    INT4_BF16,
    INT4_F16,
    INT8_F32,
    INT8_ZERO,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    Q2_K,
    Q3_K,
    Q6_K,
    QuantizedRows,
    WeightFormat,
    rows_of_codes,
    rows_of_fp8,
    rows_of_mxfp4,
    rows_of_nvfp4,
    rows_of_pairs,
)


def normal(*shape: int) -> torch.Tensor:
    """Draw numbers that are about normal, of integers: `torch.randn` has other bits on some machines."""
    return (torch.randint(0, 2**22, (4, *shape)).sum(0) - 2**23).float() * (3**0.5 / 2**22)


def random_rows(form: WeightFormat, num_rows: int, depth: int) -> QuantizedRows:
    if form is MXFP4:
        blocks = torch.randint(0, 256, (num_rows, depth // 32, 16), dtype=torch.uint8)
        return rows_of_mxfp4(blocks, torch.randint(115, 127, (num_rows, depth // 32), dtype=torch.uint8))
    scales = scales_of(num_rows, depth)
    if form is INT8_F32:
        return rows_of_codes(torch.randint(-128, 128, (num_rows, depth)).to(torch.int8), scales)
    if form is INT8_ZERO:
        zeros = torch.randint(0, 256, scales.shape, dtype=torch.uint8)
        return rows_of_codes(torch.randint(0, 256, (num_rows, depth), dtype=torch.uint8), scales, zeros)
    if form is FP8:
        return rows_of_fp8(e4m3(num_rows, depth), scales)
    if form is FP8_BLOCK:
        return rows_of_fp8(e4m3(num_rows, depth), scales[:, : depth // 128])
    pairs = torch.randint(0, 256, (num_rows, depth // 2), dtype=torch.uint8)
    if form is NVFP4:
        return rows_of_nvfp4(pairs, e4m3(num_rows, depth // 16), torch.tensor(0.37))
    if form in (INT4_F16, INT4_BF16):
        scales = scales.to(torch.float16 if form is INT4_F16 else torch.bfloat16)
        return rows_of_pairs(pairs, scales, torch.randint(0, 16, scales.shape, dtype=torch.uint8))
    if form is IQ4_NL:
        halves = pairs.view(num_rows, -1, 16)
        parts = [scales.half().repeat_interleave(2, 1).unsqueeze(-1).view(torch.uint8), halves]
        return QuantizedRows(form, torch.cat(parts, -1).flatten(1), depth)
    gguf: Any = pytest.importorskip("gguf", reason="a machine for kernels alone may lack it")
    kind = gguf.GGMLQuantizationType[form.name.upper()]
    if form.block == 32:
        data = torch.from_numpy(gguf.quantize(normal(num_rows, depth).numpy(), kind))
        return QuantizedRows(form, data, depth)
    # Any bytes are valid codes and scales of a superblock; only its float16 scales must be finite.
    blocks = torch.randint(0, 256, (num_rows, depth // 256, form.block_bytes), dtype=torch.uint8)
    scales = (torch.rand(num_rows, depth // 256, 2) / 1000).half().view(torch.uint8)
    width = 2 if form in (Q3_K, Q6_K, IQ4_XS) else 4
    first = form.block_bytes - width if form in (Q2_K, Q3_K, Q6_K) else 0
    blocks[..., first : first + width] = scales[..., :width]
    return QuantizedRows(form, blocks.flatten(1), depth)


def scales_of(num_rows: int, depth: int) -> torch.Tensor:
    """Return positive scales of groups of 64."""
    return torch.rand(num_rows, depth // 64) / 64


def e4m3(*shape: int) -> torch.Tensor:
    """Return any floats of 8 bits, subnormal ones too."""
    codes = torch.randint(0, 254, shape, dtype=torch.uint8)
    return (codes + (codes >= 127)).view(torch.float8_e4m3fn)
