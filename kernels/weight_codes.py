"""How the weights of each quantised format follow from codes and scales, as data.

A weight is scale * (value(code) - zero) + least. `Coding` says of which kinds these are in a format, and `coded` takes
them out of a format's blocks without changing a bit. So one function widens all formats here, and one kernel of a GPU
unpacks all of them in registers (`kernels.gpu.packed_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# e8m0: a byte that is an exponent; the scale is half of its power of two. e4m3: a float of 8 bits. uint4, uint6: of so
# many bits, in a byte; leasts that are subtracted have as many.
ScaleKind = Literal["float16", "bfloat16", "float32", "e8m0", "e4m3", "uint4", "uint6", "int8"]
# e2m1: floats of 4 bits, doubled. iq4: the sixteen values of IQ4.
CodeKind = Literal["unsigned", "signed", "e4m3", "e2m1", "iq4"]

TABLES: dict[CodeKind, tuple[int, ...]] = {
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}


@dataclass(frozen=True, slots=True)
class Coding:
    """The kinds of numbers of a format.

    bits: of a code. group: the weights that share a scale. offset: the zero of all groups. has_zeros: groups have zeros
    of their own, a byte each. least: added as float16, or subtracted as an integer times a number of its
    superblock. whole: the dtype of a number that multiplies the scales of a superblock.
    """

    bits: int
    group: int
    scale: ScaleKind
    values: CodeKind = "unsigned"
    offset: int = 0
    has_zeros: bool = False
    least: Literal["", "added", "subtracted"] = ""
    whole: Literal["", "float16", "float32"] = ""


@dataclass(frozen=True, slots=True)
class CodedBlocks:
    """Codes uint8 [N, B, block]; scales, leasts and zeros [N, B, block / group]; numbers of superblocks [N, B]."""

    codes: Tensor
    scales: Tensor
    leasts: Tensor | None = None
    zeros: Tensor | None = None
    wholes: Tensor | None = None
    whole_leasts: Tensor | None = None


CODINGS: dict[str, Coding] = {
    "q8_0": Coding(8, 32, "float16", "signed"),
    "q4_0": Coding(4, 32, "float16", offset=8),
    "q4_1": Coding(4, 32, "float16", least="added"),
    "q5_0": Coding(5, 32, "float16", offset=16),
    "q5_1": Coding(5, 32, "float16", least="added"),
    "q2_k": Coding(2, 16, "uint4", least="subtracted", whole="float16"),
    "q3_k": Coding(3, 16, "int8", offset=4, whole="float16"),
    "q4_k": Coding(4, 32, "uint6", least="subtracted", whole="float16"),
    "q5_k": Coding(5, 32, "uint6", least="subtracted", whole="float16"),
    "q6_k": Coding(6, 16, "int8", offset=32, whole="float16"),
    "mxfp4": Coding(4, 32, "e8m0", "e2m1"),
    "iq4_nl": Coding(4, 32, "float16", "iq4"),
    "iq4_xs": Coding(4, 32, "int8", "iq4", whole="float16"),
    "int4_f16": Coding(4, 32, "float16", has_zeros=True),
    "int4_bf16": Coding(4, 32, "bfloat16", has_zeros=True),
    "int8_f32": Coding(8, 32, "float32", "signed"),
    "int8_zero": Coding(8, 32, "float32", has_zeros=True),
    "fp8_f32": Coding(8, 32, "float32", "e4m3"),
    "fp8_128": Coding(8, 128, "float32", "e4m3"),
    "nvfp4_f32": Coding(4, 16, "e4m3", "e2m1", whole="float32"),
}


def coded(name: str, blocks: Tensor) -> CodedBlocks:
    """Take apart the blocks [N, B, block_bytes] of a format, on any device."""
    return _TAKERS[name](blocks)


def dequantise(name: str, blocks: Tensor) -> Tensor:
    """Return the weights [N, B, block] of a format in float32, with the bits that ggml's definitions give."""
    coding, parts = CODINGS[name], coded(name, blocks)
    scales = scale_numbers(coding.scale, parts.scales)
    if parts.wholes is not None:
        scales = parts.wholes.float().unsqueeze(-1) * scales
    values = _values(coding, parts.codes).unflatten(-1, (-1, coding.group))
    values = values - (coding.offset if parts.zeros is None else parts.zeros.float().unsqueeze(-1))
    weights = scales.unsqueeze(-1) * values
    if coding.least == "added":
        assert parts.leasts is not None
        weights = weights + parts.leasts.float().unsqueeze(-1)
    elif parts.leasts is not None and parts.whole_leasts is not None:
        weights = weights - (parts.whole_leasts.float().unsqueeze(-1) * parts.leasts.float()).unsqueeze(-1)
    return weights.flatten(-2)


def scale_numbers(kind: ScaleKind, scales: Tensor) -> Tensor:
    """Return scales as they are stored in float32."""
    if kind == "e4m3":
        return scales.contiguous().view(torch.float8_e4m3fn).float()
    if kind == "e8m0":
        exponents = scales.int()
        return torch.where(exponents < 2, 0x200000 << exponents, (exponents - 1) << 23).view(torch.float32)
    return scales.float()


def _values(coding: Coding, codes: Tensor) -> Tensor:
    if coding.values == "signed":
        return codes.contiguous().view(torch.int8).float()
    if coding.values == "e4m3":
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    if coding.values in TABLES:
        return torch.tensor(TABLES[coding.values], dtype=torch.float32, device=codes.device)[codes.long()]
    return codes.float()


def _numbers(blocks: Tensor, first: int, dtype: torch.dtype, count: int = 1) -> Tensor:
    """Return `count` numbers of `dtype` from byte `first` of each block on."""
    return blocks[..., first : first + count * dtype.itemsize].contiguous().view(dtype)


def _half(blocks: Tensor, first: int) -> Tensor:
    """Return the float16 at byte `first` of each superblock, [N, B]."""
    return _numbers(blocks, first, torch.float16).squeeze(-1)


def _nibbles(low_and_high: Tensor) -> Tensor:
    """Return the codes of bytes [..., n]: their low halves, then their high halves, [..., 2 n]."""
    return torch.cat([low_and_high & 15, low_and_high >> 4], -1)


def _shifts(device: torch.device, end: int, step: int = 1) -> Tensor:
    return torch.arange(0, end, step, dtype=torch.uint8, device=device).unsqueeze(-1)


def _five_bits(bits_and_halves: Tensor) -> Tensor:
    """Return the codes of bytes [..., 20]: their fifth bits, then their halves as of codes of 4 bits."""
    fifth = bits_and_halves[..., :4, None] >> _shifts(bits_and_halves.device, 8).squeeze(-1) & 1
    return _nibbles(bits_and_halves[..., 4:]) | fifth.flatten(-2) << 4


def _two_bits(fourths: Tensor) -> Tensor:
    """Return the codes of bytes [..., 64] by group, [..., 8, 32]."""
    return (fourths.unflatten(-1, (2, 1, 32)) >> _shifts(fourths.device, 8, 2) & 3).flatten(-3, -2)


def _halves(first: int, dtype: torch.dtype = torch.float16) -> Callable[[Tensor], CodedBlocks]:
    """Return the taker of blocks of a scale, and codes of 4 bits from byte `first` on."""
    return lambda blocks: CodedBlocks(_nibbles(blocks[..., first:]), _numbers(blocks, 0, dtype))


def _bytes(dtype: torch.dtype) -> Callable[[Tensor], CodedBlocks]:
    """Return the taker of blocks of a scale, and codes of 8 bits behind it."""
    return lambda blocks: CodedBlocks(blocks[..., dtype.itemsize :], _numbers(blocks, 0, dtype))


def _int4(dtype: torch.dtype) -> Callable[[Tensor], CodedBlocks]:
    return lambda blocks: CodedBlocks(_nibbles(blocks[..., 3:]), _numbers(blocks, 0, dtype), zeros=blocks[..., 2:3])


def _q4_1(blocks: Tensor) -> CodedBlocks:
    return CodedBlocks(
        _nibbles(blocks[..., 4:]), _numbers(blocks, 0, torch.float16), leasts=_numbers(blocks, 2, torch.float16)
    )


def _q5_1(blocks: Tensor) -> CodedBlocks:
    return CodedBlocks(
        _five_bits(blocks[..., 4:]), _numbers(blocks, 0, torch.float16), leasts=_numbers(blocks, 2, torch.float16)
    )


def _q2_k(blocks: Tensor) -> CodedBlocks:
    codes, both = _two_bits(blocks[..., 16:80]).flatten(-2), blocks[..., :16]
    return CodedBlocks(codes, both & 15, both >> 4, None, _half(blocks, 80), _half(blocks, 82))


def _q3_k(blocks: Tensor) -> CodedBlocks:
    shifts = _shifts(blocks.device, 8)
    third = (blocks[..., None, :32] >> shifts & 1) << 2
    high = (blocks[..., None, 104:108] >> 2 * shifts[:4] & 3).flatten(-2)
    scales = (_nibbles(blocks[..., 96:104]) | high << 4).to(torch.int8) - 32
    return CodedBlocks((_two_bits(blocks[..., 32:96]) | third).flatten(-2), scales, wholes=_half(blocks, 108))


def _q4_k(blocks: Tensor) -> CodedBlocks:
    low, middle, high = blocks[..., 4:16].split(4, -1)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    leasts = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    codes = blocks[..., -128:].unflatten(-1, (4, 32))
    groups = torch.stack([codes & 15, codes >> 4], -2).flatten(-3, -2)
    return CodedBlocks(groups.flatten(-2), scales, leasts, None, _half(blocks, 0), _half(blocks, 2))


def _q5_k(blocks: Tensor) -> CodedBlocks:
    fifth = (blocks[..., None, 16:48] >> _shifts(blocks.device, 8) & 1) << 4
    four = _q4_k(blocks)
    codes = four.codes | fifth.flatten(-2)
    return CodedBlocks(codes, four.scales, four.leasts, None, four.wholes, four.whole_leasts)


def _q6_k(blocks: Tensor) -> CodedBlocks:
    low = blocks[..., :128].unflatten(-1, (2, 1, 64)) >> _shifts(blocks.device, 8, 4) & 15
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> _shifts(blocks.device, 8, 2) & 3) << 4
    codes = low.flatten(-2).unflatten(-1, (4, 32)) | high
    return CodedBlocks(codes.flatten(-3), _numbers(blocks, 192, torch.int8, 16), wholes=_half(blocks, 208))


def _iq4_xs(blocks: Tensor) -> CodedBlocks:
    high = (blocks[..., 2:4, None] >> _shifts(blocks.device, 8, 2).squeeze(-1) & 3).flatten(-2)
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2)
    codes = _nibbles(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return CodedBlocks(codes, (low | high << 4).to(torch.int8) - 32, wholes=_half(blocks, 0))


def _nvfp4(blocks: Tensor) -> CodedBlocks:
    codes = _nibbles(blocks[..., 8:].unflatten(-1, (2, 16))).flatten(-2)
    # Doubled codes take half the scale.
    return CodedBlocks(codes, blocks[..., 4:8], wholes=_numbers(blocks, 0, torch.float32).squeeze(-1) * 0.5)


def _int8_zero(blocks: Tensor) -> CodedBlocks:
    return CodedBlocks(blocks[..., 5:] ^ 128, _numbers(blocks, 0, torch.float32), zeros=blocks[..., 4:5])


_TAKERS: dict[str, Callable[[Tensor], CodedBlocks]] = {
    "q8_0": _bytes(torch.float16),
    "q4_0": _halves(2),
    "q4_1": _q4_1,
    "q5_0": lambda blocks: CodedBlocks(_five_bits(blocks[..., 2:]), _numbers(blocks, 0, torch.float16)),
    "q5_1": _q5_1,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "mxfp4": _halves(1, torch.uint8),
    "iq4_nl": _halves(2),
    "iq4_xs": _iq4_xs,
    "int4_f16": _int4(torch.float16),
    "int4_bf16": _int4(torch.bfloat16),
    "int8_f32": _bytes(torch.float32),
    "int8_zero": _int8_zero,
    "fp8_f32": _bytes(torch.float32),
    "fp8_128": _bytes(torch.float32),
    "nvfp4_f32": _nvfp4,
}
