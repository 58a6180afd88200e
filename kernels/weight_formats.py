"""Quantised weights as checkpoints keep them: rows of blocks along the depth, in a format of few bits per weight.

A loader makes a `QuantizedRows` of every matrix, without changing a value: the bytes of a GGUF tensor are its data
as they are, and other checkpoints' codes, scales and zero points are put into the blocks of one of the formats below
(`rows_of_mxfp4`, `rows_of_codes`). Rows are selected, ordered and joined as rows of any tensor. `pack_linear` and the
layouts of experts take them in place of a float matrix, and repack them for the kernels
without widening them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# How products with quantised weights are computed. int8: rows are rounded to 8 bits in blocks of 32, and the products
# of a block are summed as integers. exact: rows stay float32, weights are widened to float32 in the cache.
Arithmetic = Literal["int8", "exact"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of quantised weights. The formats are the constants of this module.

    number: of the format in `quantised.h`. block: the weights of one block, all of one row. block_bytes: of a block in
    a row. packed_bytes: of a block in the panels of the compiled kernels.
    """

    name: str
    number: int
    block: int
    block_bytes: int
    packed_bytes: int

    def row_bytes(self, depth: int) -> int:
        """Return the bytes of a row of `depth` weights. Raise ValueError unless they are whole blocks."""
        if depth % self.block:
            raise ValueError(f"rows of {depth} weights are not blocks of {self.block}, as {self.name} needs")
        return depth // self.block * self.block_bytes


# Formats of GGUF, in which d, m: float16 and q: codes. Byte i of the 16 bytes of codes of 4 bits holds weight i in its
# low half and weight 16 + i in its high half.
# d, q[32] int8: d q.
Q8_0 = WeightFormat("q8_0", 0, 32, 34, 34)
# d, q[16]: d (q - 8).
Q4_0 = WeightFormat("q4_0", 1, 32, 18, 18)
# d, m, q[16]: d q + m.
Q4_1 = WeightFormat("q4_1", 2, 32, 20, 20)
# Superblocks of 256 with scales of 6 bits; see ggml's block_q4_K, block_q5_K and block_q6_K.
Q4_K = WeightFormat("q4_k", 3, 256, 144, 148)
Q5_K = WeightFormat("q5_k", 4, 256, 176, 180)
Q6_K = WeightFormat("q6_k", 5, 256, 210, 210)
# e, q[16]: 2^(e - 127) times the float of sign, two bits of exponent and one of mantissa that q encodes.
MXFP4 = WeightFormat("mxfp4", 6, 32, 17, 17)
# Formats of other checkpoints. d, zero (one byte), q[16]: d (q - zero), with d float16 or bfloat16.
INT4_F16 = WeightFormat("int4_f16", 7, 32, 19, 19)
INT4_BF16 = WeightFormat("int4_bf16", 8, 32, 19, 19)
# d float32, q[32] int8: d q.
INT8_F32 = WeightFormat("int8_f32", 9, 32, 36, 36)

FORMATS = {form.name: form for form in (Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, MXFP4, INT4_F16, INT4_BF16, INT8_F32)}


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A matrix [N, depth]; data: uint8 [N, format.row_bytes(depth)], of any strides between rows."""

    format: WeightFormat
    data: Tensor
    depth: int

    def __post_init__(self) -> None:
        if self.data.dtype != torch.uint8 or self.data.shape[1:] != (self.format.row_bytes(self.depth),):
            raise ValueError(
                f"{tuple(self.data.shape)} bytes are not rows of {self.depth} weights in {self.format.name}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """N and the depth."""
        return self.data.shape[0], self.depth

    def rows(self, which: slice | Tensor) -> QuantizedRows:
        """Return some rows, or all in another order. Bytes of zeros are weights of zero in every format."""
        return QuantizedRows(self.format, self.data[which], self.depth)


def joined_rows(parts: Sequence[QuantizedRows]) -> QuantizedRows | None:
    """Return the rows of several matrices one below the other; None if their formats differ."""
    first = parts[0]
    if any((part.format, part.depth) != (first.format, first.depth) for part in parts):
        return None
    return QuantizedRows(first.format, torch.cat([part.data for part in parts]), first.depth)


def rows_of_mxfp4(blocks: Tensor, scales: Tensor) -> QuantizedRows:
    """Return the rows of MXFP4 as safetensors keep it: blocks [N, G, 16] uint8, scales [N, G] uint8.

    A byte of `blocks` holds two neighbouring weights, the earlier one in its low half.
    """
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    halves = codes[..., :16] | codes[..., 16:] << 4
    data = torch.cat([scales.unsqueeze(-1), halves], -1).flatten(1)
    return QuantizedRows(MXFP4, data, 32 * scales.shape[1])


def rows_of_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> QuantizedRows:
    """Return rows of the weights scale * (code - zero), in groups of 32 or a multiple of 32.

    codes: [N, K], uint8 of 4 bits with `zeros`, or int8 without. scales: [N, K / group] float16, bfloat16 or, without
    zeros, any float dtype. zeros: [N, K / group] uint8. Every weight keeps its value. Raises ValueError for other
    dtypes or shapes.
    """
    num_rows, depth = codes.shape
    repeats = depth // scales.shape[1] // 32
    if depth != scales.shape[1] * repeats * 32:
        raise ValueError(f"{depth} weights of a row are not {scales.shape[1]} groups of 32 or a multiple of it")
    scales = scales.repeat_interleave(repeats, 1)
    blocks = codes.view(num_rows, -1, 32)
    if zeros is None:
        if codes.dtype != torch.int8:
            raise ValueError(f"codes without zero points are int8, not {codes.dtype}")
        parts = [scales.float().unsqueeze(-1).view(torch.uint8), blocks.view(torch.uint8)]
        return QuantizedRows(INT8_F32, torch.cat(parts, -1).flatten(1), depth)
    formats = {torch.float16: INT4_F16, torch.bfloat16: INT4_BF16}
    if codes.dtype != torch.uint8 or scales.dtype not in formats:
        raise ValueError(f"codes with zero points are uint8 with 16-bit scales, not {codes.dtype} with {scales.dtype}")
    parts = [
        scales.unsqueeze(-1).view(torch.uint8),
        zeros.repeat_interleave(repeats, 1).unsqueeze(-1),
        blocks[..., :16] | blocks[..., 16:] << 4,
    ]
    return QuantizedRows(formats[scales.dtype], torch.cat(parts, -1).flatten(1), depth)
