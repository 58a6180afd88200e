"""Quantised weights as checkpoints keep them: rows of blocks along the depth, in a format of few bits per weight.

A loader makes a `QuantizedRows` of every matrix, without changing a value: the bytes of a GGUF tensor are its data
as they are, and other checkpoints' codes, scales and zero points are put into the blocks of one of the formats below
(`rows_of_mxfp4`, `rows_of_codes`). Rows are selected, ordered and joined as rows of any tensor. `pack_linear` and the
layouts of experts take them in place of a float matrix, and repack them for the kernels
without widening them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def dequantise(self) -> Tensor:
        """Return the weights [N, depth] in float32, with the bits that ggml's definitions of its formats give."""
        blocks = self.data.reshape(len(self.data), -1, self.format.block_bytes)
        return _WIDEN[self.format](blocks).reshape(len(self.data), self.depth)


# A matrix [N, K] in a checkpoint: numbers, or quantised.
Matrix = Tensor | QuantizedRows


def widened(matrix: Matrix) -> Tensor:
    """Return a matrix as numbers, float32 if it is quantised."""
    return matrix.dequantise() if isinstance(matrix, QuantizedRows) else matrix


def joined_rows(parts: Sequence[QuantizedRows]) -> QuantizedRows | None:
    """Return the rows of several matrices one below the other; None if their formats differ, or without any."""
    if not parts:
        return None
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


def _numbers(blocks: Tensor, first: int, dtype: torch.dtype) -> Tensor:
    """Return the number of `dtype` at byte `first` of each block, [..., 1] float32."""
    return blocks[..., first : first + dtype.itemsize].contiguous().view(dtype).float()


def _nibbles(low_and_high: Tensor) -> Tensor:
    """Return the codes of bytes [..., n]: their low halves, then their high halves, [..., 2 n]."""
    return torch.cat([low_and_high & 15, low_and_high >> 4], -1)


def _widen_int4(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    codes = _nibbles(blocks[..., 3:]).float() - blocks[..., 2:3].float()
    return _numbers(blocks, 0, dtype) * codes


def _widen_q4_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[..., 4:]).float()
    return _numbers(blocks, 0, torch.float16) * codes + _numbers(blocks, 2, torch.float16)


def _widen_mxfp4(blocks: Tensor) -> Tensor:
    doubled = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)
    return torch.ldexp(doubled[_nibbles(blocks[..., 1:]).long()], blocks[..., :1].int() - 128)


def _widen_q4_k(blocks: Tensor, high_bits: bool) -> Tensor:
    scales = blocks[..., 4:16].int()
    low, middle, high = scales.split(4, -1)
    of_groups = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1).float()
    mins = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1).float()
    codes = blocks[..., -128:].unflatten(-1, (4, 32))
    groups = torch.stack([codes & 15, codes >> 4], -2).flatten(-3, -2)
    if high_bits:
        shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
        groups = groups | (blocks[..., None, 16:48] >> shifts & 1) << 4
    scale = (_numbers(blocks, 0, torch.float16) * of_groups).unsqueeze(-1)
    return scale * groups.float() - (_numbers(blocks, 2, torch.float16) * mins).unsqueeze(-1)


def _widen_q6_k(blocks: Tensor) -> Tensor:
    low = blocks[..., :128].unflatten(-1, (2, 1, 64)) >> torch.tensor([[0], [4]], dtype=torch.uint8) & 15
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3) << 4
    codes = low.flatten(-2).unflatten(-1, (4, 32)) | high
    scales = _numbers(blocks, 208, torch.float16) * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return scales.unsqueeze(-1) * (codes.flatten(-3).unflatten(-1, (16, 16)).float() - 32.0)


def _widen_int8(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    return _numbers(blocks, 0, dtype) * blocks[..., dtype.itemsize :].contiguous().view(torch.int8).float()


# Widens blocks [N, depth / block, block_bytes] to float32 [N, ...].
_WIDEN: dict[WeightFormat, Callable[[Tensor], Tensor]] = {
    Q8_0: lambda blocks: _widen_int8(blocks, torch.float16),
    Q4_0: lambda blocks: _numbers(blocks, 0, torch.float16) * (_nibbles(blocks[..., 2:]).float() - 8.0),
    Q4_1: _widen_q4_1,
    Q4_K: lambda blocks: _widen_q4_k(blocks, high_bits=False),
    Q5_K: lambda blocks: _widen_q4_k(blocks, high_bits=True),
    Q6_K: _widen_q6_k,
    MXFP4: _widen_mxfp4,
    INT4_F16: lambda blocks: _widen_int4(blocks, torch.float16),
    INT4_BF16: lambda blocks: _widen_int4(blocks, torch.bfloat16),
    INT8_F32: lambda blocks: _widen_int8(blocks, torch.float32),
}
