"""Reads the quantised matrices of a safetensors checkpoint as rows of blocks, without changing a value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.weight_formats import (
    QuantizedRows,
    rows_of_codes,
    rows_of_fp8,
    rows_of_mxfp4,
    rows_of_nvfp4,
    rows_of_pairs,
)
from moeserve.model.spec import CheckpointError
from moeserve.model.stored import PackedPart

_BAND_ROWS = 256  # Rows of FP8 that are widened at once.
# Reads the tensor of a role of a matrix.
Read = Callable[[str], Tensor]


def read_rows(name: str, part: PackedPart, read: Read) -> QuantizedRows:
    """Return the rows of the matrix `name`. Raise CheckpointError for content that makes no sense."""
    try:
        return _READERS[part.layout](part, read)
    except ValueError as error:
        raise CheckpointError(f"{name} cannot be read: {error}.") from None


def read_numbers(name: str, part: PackedPart, read: Read) -> Tensor:
    """Return the matrix `name` [N, K] in float32, also where its groups are no blocks."""
    try:
        return _NUMBERS[part.layout](part, read)
    except ValueError as error:
        raise CheckpointError(f"{name} cannot be read: {error}.") from None


def _gptq(part: PackedPart, read: Read) -> QuantizedRows:
    scales, zeros = read("scales").T, _zeros_of_gptq(part, read)
    order = _order_of_groups(part, read("groups")) if "groups" in part.tensors else None
    words = read("codes").T.contiguous()
    if order is None and part.bits == 4:
        return rows_of_pairs(words.view(torch.uint8), scales, zeros)
    return _ordered_rows(unpack(words, part.bits), scales, zeros, part.bits, order)


def _ordered_rows(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, order: Tensor | None) -> QuantizedRows:
    """Return rows of codes [N, K] whose columns are put into an order first; None leaves them."""
    if order is not None:
        codes = codes[:, order]
    if bits == 8:
        rows = rows_of_codes(codes, scales, zeros)
    else:
        rows = rows_of_pairs(codes[:, ::2] | codes[:, 1::2] << 4, scales, zeros)
    return rows if order is None else QuantizedRows(rows.format, rows.data, rows.depth, order)


def _zeros_of_gptq(part: PackedPart, read: Read) -> Tensor:
    """Return the zero points [N, G] uint8. Zero points that are stored less one wrap around at zero."""
    zeros = unpack(read("zeros"), part.bits).T
    return (zeros + 1) & (2**part.bits - 1) if part.zeros_less_one else zeros


def _order_of_groups(part: PackedPart, groups: Tensor) -> Tensor | None:
    """Return the columns [K] group after group, None if they lie so. Raise ValueError for groups of other sizes."""
    wanted = torch.arange(len(groups)) // part.group
    if torch.equal(groups.long(), wanted):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].long(), wanted):
        raise ValueError(f"its groups are not of {part.group} columns each")
    if not part.has_order:
        raise ValueError("its columns are not in the order of their groups, but the configuration says so")
    return order


def _gptq_numbers(part: PackedPart, read: Read) -> Tensor:
    codes, depth = unpack(read("codes").T.contiguous(), part.bits).float(), part.tensors["codes"][1].shape[0]
    groups = torch.arange(depth * 32 // part.bits) // part.group
    if "groups" in part.tensors:
        groups = read("groups").long()
        if bool(((groups < 0) | (groups >= part.tensors["scales"][1].shape[0])).any()):
            raise ValueError("its groups have no scales")
    return read("scales").T.float()[:, groups] * (codes - _zeros_of_gptq(part, read).float()[:, groups])


# The columns of the matrix in the halves of bytes of a word, the low halves first.
_AWQ_LOW, _AWQ_HIGH = (0, 4, 1, 5), (2, 6, 3, 7)


def _awq(part: PackedPart, read: Read) -> QuantizedRows:
    codes = _unpack_awq(read("codes")).T.contiguous()
    return rows_of_pairs(codes[:, ::2] | codes[:, 1::2] << 4, read("scales").T, _unpack_awq(read("zeros")).T)


def _awq_numbers(part: PackedPart, read: Read) -> Tensor:
    codes, scales, zeros = _unpack_awq(read("codes")), read("scales"), _unpack_awq(read("zeros"))
    wide = [numbers.float().repeat_interleave(part.group, 0) for numbers in (scales, zeros)]
    return (wide[0] * (codes.float() - wide[1])).T.contiguous()


def _unpack_awq(words: Tensor) -> Tensor:
    """Return the codes of words [R, C], uint8 [R, 8 C]."""
    pairs = words.contiguous().view(torch.uint8).unflatten(1, (-1, 4))
    codes = torch.empty((*pairs.shape[:2], 8), dtype=torch.uint8)
    codes[..., _AWQ_LOW] = pairs & 15
    codes[..., _AWQ_HIGH] = pairs >> 4
    return codes.flatten(1)


def _words(part: PackedPart, read: Read) -> QuantizedRows:
    scales, zeros = read("scales"), _zeros_of_words(part, read)
    order = _order_of_groups(part, read("groups")) if "groups" in part.tensors else None
    words = read("codes")
    if order is None and part.bits == 4:
        return rows_of_pairs(words.contiguous().view(torch.uint8), scales, zeros)
    return _ordered_rows(unpack(words, part.bits), scales, zeros, part.bits, order)


def _zeros_of_words(part: PackedPart, read: Read) -> Tensor:
    """Return the zero points [N, G] uint8; codes are stored above the middle of their range."""
    num_rows, num_groups = part.tensors["scales"][1].shape
    if "zeros" not in part.tensors:
        return torch.full((num_rows, num_groups), 1 << part.bits - 1, dtype=torch.uint8)
    zeros = read("zeros")
    if zeros.dtype == torch.int8:  # As earlier versions wrote them, one in a byte.
        return (zeros + (1 << part.bits - 1)).view(torch.uint8)
    return unpack(zeros.T, part.bits).T[:num_rows]


def _words_numbers(part: PackedPart, read: Read) -> Tensor:
    codes, scales = unpack(read("codes"), part.bits).float(), read("scales").float()
    groups = read("groups").long() if "groups" in part.tensors else torch.arange(codes.shape[1]) // part.group
    if bool(((groups < 0) | (groups >= scales.shape[1])).any()):
        raise ValueError("its groups have no scales")
    return scales[:, groups] * (codes - _zeros_of_words(part, read).float()[:, groups])


def _codes(part: PackedPart, read: Read) -> QuantizedRows:
    codes, scales = read("codes"), _of_rows(read("scales"), part)
    if "zeros" not in part.tensors:
        return rows_of_codes(codes, scales)
    zeros = _of_rows(read("zeros"), part)
    return rows_of_codes(codes.view(torch.uint8) ^ 128, scales, zeros.view(torch.uint8) ^ 128)


def _codes_numbers(part: PackedPart, read: Read) -> Tensor:
    codes, scales = read("codes").float(), _of_rows(read("scales"), part).float()
    zeros = _of_rows(read("zeros"), part).float() if "zeros" in part.tensors else torch.zeros_like(scales)
    scales, zeros = (numbers.repeat_interleave(part.group, 1) for numbers in (scales, zeros))
    return scales * (codes - zeros)


def _fp8(part: PackedPart, read: Read) -> QuantizedRows:
    codes = read("codes")
    num_rows, depth = codes.shape
    scales = _bands(read("scales"), part, codes).float().repeat_interleave(part.rows, 0)[:num_rows]
    if depth % part.group and scales.shape[1] > 1:  # The last group is narrower.
        scales = scales.repeat_interleave(part.group // 32, 1)[:, : depth // 32]
    return rows_of_fp8(codes, scales)


def expand_fp8(part: PackedPart, codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Fill `out` [..., N, K], of any float dtype, with codes of the same shape times the scales of their blocks.

    Work a band of rows at a time, in float32.
    """
    bands, at_once = _bands(scales, part, codes), -(-_BAND_ROWS // part.rows)
    for first in range(0, bands.shape[-2], at_once):
        where = (..., slice(first * part.rows, (first + at_once) * part.rows), slice(None))
        wide = bands[..., first : first + at_once, :].float().repeat_interleave(part.rows, -2)
        numbers = codes[where].float()
        wide = wide.repeat_interleave(part.group, -1)[..., : numbers.shape[-2], : numbers.shape[-1]]
        out[where] = numbers.mul_(wide)


def _fp8_numbers(part: PackedPart, read: Read) -> Tensor:
    codes = read("codes")
    out = torch.empty(codes.shape)
    expand_fp8(part, codes, read("scales"), out)
    return out


def _bands(scales: Tensor, part: PackedPart, codes: Tensor) -> Tensor:
    """Return scales of blocks with all of their dimensions: [..., ceil(N / rows), ceil(K / group)]."""
    *leading, num_rows, depth = codes.shape
    return scales.reshape(*leading, -(-num_rows // part.rows), -(-depth // part.group))


def _of_rows(scales: Tensor, part: PackedPart) -> Tensor:
    """Return numbers [N, G] of scales that rows share."""
    num_rows = part.tensors["codes"][1].shape[0]
    bands = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    return bands.repeat_interleave(part.rows, 0)[:num_rows]


def _nvfp4(part: PackedPart, read: Read) -> QuantizedRows:
    return rows_of_nvfp4(read("codes"), read("scales"), _factor(part, read))


def _mxfp4(part: PackedPart, read: Read) -> QuantizedRows:
    scales = read("scales")
    return rows_of_mxfp4(read("codes").view(*scales.shape, 16), scales)


def _mxfp4_numbers(part: PackedPart, read: Read) -> Tensor:
    return _mxfp4(part, read).dequantise()


def _nvfp4_numbers(part: PackedPart, read: Read) -> Tensor:
    return _nvfp4(part, read).dequantise()


def _factor(part: PackedPart, read: Read) -> Tensor:
    return read("factor").float() if "factor" in part.tensors else read("divisor").float().reciprocal()


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the codes of words [R, C] along rows, the lowest bits first: uint8 [R, 32 / bits * C]."""
    codes = words.contiguous().view(torch.uint8)
    return codes if bits == 8 else torch.stack([codes & 15, codes >> 4], -1).flatten(1)


_READERS = {"gptq": _gptq, "awq": _awq, "words": _words, "codes": _codes, "fp8": _fp8, "nvfp4": _nvfp4}
_READERS |= {"mxfp4": _mxfp4}
_NUMBERS = {
    "gptq": _gptq_numbers,
    "awq": _awq_numbers,
    "words": _words_numbers,
    "codes": _codes_numbers,
    "fp8": _fp8_numbers,
    "nvfp4": _nvfp4_numbers,
    "mxfp4": _mxfp4_numbers,
}
