"""Quantised weights as checkpoints keep them: rows of blocks along the depth, in a format of few bits per weight.

A loader makes a `QuantizedRows` of every matrix, without changing a value: the bytes of a GGUF tensor are its data
as they are, and other checkpoints' codes, scales and zero points are put into the blocks of one of the formats below
(`rows_of_pairs`, `rows_of_codes`, ...). Rows are selected, ordered and joined as rows of any tensor. `pack_linear` and
the layouts of experts take them in place of a float matrix, and repack them for the kernels without widening them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kernels.weight_codes import dequantise

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
# d, h[4], q[16] and d, m, h[4], q[16], bit i of h the fifth bit of weight i: d (q - 16) and d q + m.
Q5_0 = WeightFormat("q5_0", 13, 32, 22, 22)
Q5_1 = WeightFormat("q5_1", 14, 32, 24, 24)
# Superblocks of 256, with scales of 6 bits, those of Q2_K of 4; see ggml's block_q2_K to block_q6_K.
Q2_K = WeightFormat("q2_k", 19, 256, 84, 84)
Q3_K = WeightFormat("q3_k", 18, 256, 110, 114)
Q4_K = WeightFormat("q4_k", 3, 256, 144, 148)
Q5_K = WeightFormat("q5_k", 4, 256, 176, 180)
Q6_K = WeightFormat("q6_k", 5, 256, 210, 210)
# e, q[16]: 2^(e - 127) times the float of sign, two bits of exponent and one of mantissa that q encodes.
MXFP4 = WeightFormat("mxfp4", 6, 32, 17, 17)
# d, q[16]: d v(q), where v are ggml's sixteen values; and superblocks of 256 of them with scales of 6 bits, see its
# block_iq4_xs.
IQ4_NL = WeightFormat("iq4_nl", 16, 32, 18, 18)
IQ4_XS = WeightFormat("iq4_xs", 17, 256, 136, 138)
# Formats of other checkpoints. d, zero (one byte), q[16]: d (q - zero), with d float16 or bfloat16.
INT4_F16 = WeightFormat("int4_f16", 7, 32, 19, 19)
INT4_BF16 = WeightFormat("int4_bf16", 8, 32, 19, 19)
# d float32, q[32] int8: d q.
INT8_F32 = WeightFormat("int8_f32", 9, 32, 36, 36)
# d float32, zero (one byte), q[32] int8: d (q + 128 - zero).
INT8_ZERO = WeightFormat("int8_zero", 10, 32, 37, 37)
# d float32, q[32] floats of 8 bits (e4m3): d q. Multiplied with rows of floats in either arithmetic.
LARGEST_FP8_SCALE = 128.0  # Kernels multiply scales by 2^120.
FP8 = WeightFormat("fp8_f32", 11, 32, 36, 36)
# d float32, q[128] of the same.
FP8_BLOCK = WeightFormat("fp8_128", 15, 128, 132, 132)
FP8_FORMATS = (FP8, FP8_BLOCK)
# d float32, e[4] floats of 8 bits (e4m3), q[32]: d e[i / 16] times the float that q encodes as in MXFP4, weight i.
NVFP4 = WeightFormat("nvfp4_f32", 12, 64, 40, 40)

_OF_GGUF = (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, MXFP4, IQ4_NL, IQ4_XS)
_ALL = (*_OF_GGUF, INT4_F16, INT4_BF16, INT8_F32, INT8_ZERO, FP8, FP8_BLOCK, NVFP4)
FORMATS = {form.name: form for form in _ALL}


class QuantizedRows:
    """A matrix [N, depth] in blocks.

    data: uint8 [N, format.row_bytes(depth)], of any strides between rows; or several such, one below the other, which
    stay where they are. order: int64 [depth], the column of the matrix that each weight of a row belongs to; None if
    they are in order. is_fine: where rows that it multiplies are rounded, the rest of a row is rounded once more, to 16
    bits in all; only for weights of 8 bits. Raise ValueError for data of another shape or dtype.
    """

    __slots__ = ("depth", "format", "is_fine", "order", "pieces")

    def __init__(
        self,
        format: WeightFormat,
        data: Tensor | Sequence[Tensor],
        depth: int,
        order: Tensor | None = None,
        is_fine: bool = False,
    ) -> None:
        self.format, self.depth, self.order = format, depth, order
        # The rounding of weights to fewer bits costs far more than that of rows.
        self.is_fine = is_fine and format.packed_bytes >= format.block
        self.pieces = (data,) if isinstance(data, Tensor) else tuple(data)
        for piece in self.pieces:
            if piece.dtype != torch.uint8 or piece.shape[1:] != (format.row_bytes(depth),):
                raise ValueError(f"{tuple(piece.shape)} bytes are not rows of {depth} weights in {format.name}")

    @property
    def data(self) -> Tensor:
        """All rows as one tensor, a copy if there are several."""
        # By numpy: torch copies on several threads, and waits for each of them however busy the machine is.
        pieces = self.pieces
        return pieces[0] if len(pieces) == 1 else torch.from_numpy(np.concatenate([piece.numpy() for piece in pieces]))

    @property
    def shape(self) -> tuple[int, int]:
        """N and the depth."""
        return sum(map(len, self.pieces)), self.depth

    def rows(self, which: slice | Tensor) -> QuantizedRows:
        """Return some rows, or all in another order. Bytes of zeros are weights of zero in every format."""
        return QuantizedRows(self.format, self.data[which], self.depth, self.order)

    def columns(self, first: int, end: int) -> QuantizedRows:
        """Return some columns, a copy. Raise ValueError unless these are whole blocks in the order of the matrix."""
        if self.order is not None:
            raise ValueError("its columns are in an order of their own")
        begin = self.format.row_bytes(first)
        width = self.format.row_bytes(end - first)
        return QuantizedRows(self.format, self.data[:, begin : begin + width].contiguous(), end - first)

    def fine(self) -> QuantizedRows:
        """Return the same matrix for rows that are rounded twice, if its weights have 8 bits."""
        return QuantizedRows(self.format, self.pieces, self.depth, self.order, is_fine=True)

    def dequantise(self) -> Tensor:
        """Return the weights [N, depth] in float32, with the bits that ggml's definitions of its formats give."""
        blocks = self.data.reshape(self.shape[0], -1, self.format.block_bytes)
        weights = dequantise(self.format.name, blocks).reshape(self.shape)
        return weights if self.order is None else weights[:, self.order.argsort()]


# A matrix [N, K] in a checkpoint: numbers, or quantised.
Matrix = Tensor | QuantizedRows


def widened(matrix: Matrix) -> Tensor:
    """Return a matrix as numbers, float32 if it is quantised."""
    return matrix.dequantise() if isinstance(matrix, QuantizedRows) else matrix


def joined_rows(parts: Sequence[QuantizedRows]) -> QuantizedRows | None:
    """Return the rows of several matrices one below the other; None if formats or orders differ, or without any."""
    if not parts:
        return None
    first = parts[0]
    if any((part.format, part.depth) != (first.format, first.depth) for part in parts):
        return None
    if any(not _same_order(part.order, first.order) for part in parts):
        return None
    return QuantizedRows(first.format, [piece for part in parts for piece in part.pieces], first.depth, first.order)


def _same_order(order: Tensor | None, other: Tensor | None) -> bool:
    return order is other or (order is not None and other is not None and torch.equal(order, other))


def rows_of_mxfp4(blocks: Tensor, scales: Tensor) -> QuantizedRows:
    """Return the rows of MXFP4 as safetensors keep it: blocks [N, G, 16] uint8, scales [N, G] uint8.

    A byte of `blocks` holds two neighbouring weights, the earlier one in its low half.
    """
    data = torch.cat([scales.unsqueeze(-1), _halves_of_pairs(blocks)], -1).flatten(1)
    return QuantizedRows(MXFP4, data, 32 * scales.shape[1])


def rows_of_nvfp4(pairs: Tensor, scales: Tensor, scale: Tensor) -> QuantizedRows:
    """Return rows of NVFP4: pairs [N, K / 2] uint8, two neighbouring weights per byte, the earlier one in its low half.

    scales: [N, K / 16] float8_e4m3fn; scale: float32 of one number, which multiplies all of them. Raise ValueError
    unless K is a multiple of 64 and no scale is NaN.
    """
    _check_e4m3(scales)
    num_rows, depth = len(pairs), 2 * pairs.shape[1]
    if depth % 64 or scales.shape != (num_rows, depth // 16):
        raise ValueError(f"{depth} weights of a row are not {scales.shape[1]} groups of 16")
    parts = [
        scale.float().view(1).view(torch.uint8).expand(num_rows, depth // 64, 4),
        scales.view(torch.uint8).view(num_rows, -1, 4),
        _halves_of_pairs(pairs.view(num_rows, -1, 2, 16)).flatten(2),
    ]
    return QuantizedRows(NVFP4, torch.cat(parts, -1).flatten(1), depth)


def rows_of_fp8(codes: Tensor, scales: Tensor) -> QuantizedRows:
    """Return rows of codes [N, K] float8_e4m3fn times scales [N, G] of any float dtype, for G equal groups of columns.

    Groups of a multiple of 128 have one scale for each 128 weights, others one for each 32. Raise ValueError for
    groups that are no multiple of 32, codes that are NaN, and scales of 128 and more.
    """
    _check_e4m3(codes)
    if not bool((scales.float().abs() < LARGEST_FP8_SCALE).all()):
        raise ValueError(f"its scales are not all below {LARGEST_FP8_SCALE}")
    num_rows, depth = codes.shape
    form = fp8_format(depth, -(-depth // max(scales.shape[1], 1)))
    scales = _per_block(scales.float(), depth, form.block)
    blocks = codes.view(torch.uint8).view(num_rows, -1, form.block)
    data = torch.cat([scales.unsqueeze(-1).view(torch.uint8), blocks], -1).flatten(1)
    return QuantizedRows(form, data, depth)


def fp8_format(depth: int, group: int) -> WeightFormat:
    """Return the format of rows of `depth` floats of 8 bits, where each `group` of them shares a scale."""
    return FP8 if depth % FP8_BLOCK.block or group % FP8_BLOCK.block else FP8_BLOCK


def rows_of_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> QuantizedRows:
    """Return rows of the weights scale * (code - zero), in groups of 32 or a multiple of 32. Every weight keeps its
    value.

    codes: [N, K] int8, or uint8 with `zeros`. scales: [N, K / group] of any float dtype. zeros: [N, K / group] uint8.
    Raises ValueError for other dtypes or shapes.
    """
    num_rows, depth = codes.shape
    scales = _per_block(scales.float(), depth).unsqueeze(-1).view(torch.uint8)
    if codes.dtype != (torch.int8 if zeros is None else torch.uint8):
        raise ValueError(f"codes {'without' if zeros is None else 'with'} zero points are not {codes.dtype}")
    if zeros is None:
        data = torch.cat([scales, codes.view(num_rows, -1, 32).view(torch.uint8)], -1)
        return QuantizedRows(INT8_F32, data.flatten(1), depth)
    data = torch.cat([scales, _per_block(zeros, depth).unsqueeze(-1), codes.view(num_rows, -1, 32) ^ 128], -1)
    return QuantizedRows(INT8_ZERO, data.flatten(1), depth)


def rows_of_pairs(pairs: Tensor, scales: Tensor, zeros: Tensor) -> QuantizedRows:
    """Return rows of the weights scale * (code - zero) of 4 bits, in groups of 32 or a multiple of 32. Every weight
    keeps its value.

    pairs: [N, K / 2] uint8, two neighbouring codes per byte, the earlier one in its low half. scales: [N, K / group] of
    any float dtype, zeros: [N, K / group] uint8. Scales of more than 16 bits make codes of 8 bits. Raises ValueError
    for other shapes.
    """
    num_rows, depth = len(pairs), 2 * pairs.shape[1]
    form = INT4_FORMATS.get(scales.dtype)
    zeros = _per_block(zeros, depth)
    if form is None:
        codes = torch.stack([pairs & 15, pairs >> 4], -1).view(num_rows, -1, 32)
        return rows_of_codes((codes.to(torch.int8) - zeros.unsqueeze(-1).to(torch.int8)).flatten(1), scales)
    parts = [
        _per_block(scales, depth).unsqueeze(-1).view(torch.uint8),
        zeros.unsqueeze(-1),
        _halves_of_pairs(pairs.view(num_rows, -1, 16)),
    ]
    return QuantizedRows(form, torch.cat(parts, -1).flatten(1), depth)


# The formats of codes of 4 bits with zero points, by the dtype of their scales.
INT4_FORMATS = {torch.float16: INT4_F16, torch.bfloat16: INT4_BF16}


def _per_block(numbers: Tensor, depth: int, block: int = 32) -> Tensor:
    """Repeat one number for each group of columns, [N, G], to one for each block of columns."""
    repeats = depth // numbers.shape[1] // block
    if depth != numbers.shape[1] * repeats * block:
        raise ValueError(f"{depth} weights of a row are not {numbers.shape[1]} groups of {block} or a multiple of it")
    return numbers.repeat_interleave(repeats, 1)


def _halves_of_pairs(pairs: Tensor) -> Tensor:
    """Order codes of 4 bits, 32 of them in [..., 16] bytes: pairs of neighbours become weights 16 columns apart."""
    first, second = pairs.unflatten(-1, (2, 8)).unbind(-2)
    return torch.stack([first & 15 | second << 4, first >> 4 | second & 240], -1).flatten(-2)


def _check_e4m3(numbers: Tensor) -> None:
    if bool((numbers.view(torch.uint8) & 127 == 127).any()):
        raise ValueError("it holds what is no number")
