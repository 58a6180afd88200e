"""Reads the tensors of GGUF files where they lie.

Matrices keep their blocks: rows are taken and ordered without unpacking them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from kernels.weight_formats import FORMATS, Q8_0, QuantizedRows, joined_rows
from moeserve.model.gguf.header import GgufTensor
from moeserve.model.gguf.parts import GgufPart, Heads
from moeserve.model.spec import CheckpointError

_Array = np.ndarray[Any, np.dtype[Any]]
# Bytes that the kernel is asked to read by one call: it may read less of more.
_READ_AT_ONCE = 2**19
_POPULATE_READ = 22  # MADV_POPULATE_READ, which Linux has since 5.14 and `mmap` does not name.


def read_part(part: GgufPart) -> Tensor:
    """Return the numbers of a tensor in its shape, float32 or as they are stored. Raise CheckpointError."""
    numbers = [_numbers(source) for source in part.sources]
    match part.arrangement:
        case "latent":
            keys, values = numbers
            return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)
        case "flat":
            return numbers[0].flatten()
        case "stacked" | "stacked_turned":
            experts = torch.cat([own.float() for own in numbers], 1)
            return experts if part.arrangement == "stacked" else experts.transpose(1, 2).contiguous()
        case "less_one":
            return numbers[0].float() - 1.0
        case "logarithm":
            numbers = [numbers[0].float().neg().log()]
        case "columns_in_turns":
            return numbers[0][:, _turns(part.heads, part.shape[1])]
    order = _order(part)
    rows = numbers[0] if len(numbers) == 1 else torch.cat([rows.float() for rows in numbers])
    return rows if order is None else rows[order]


def read_row(part: GgufPart, row: int) -> Tensor:
    """Return `read_part(part)[row]` of a tensor of all experts. Raise CheckpointError."""
    return _numbers(_row_of(part.sources[0], row))


def read_packed(part: GgufPart, expert: int | None = None, *, holds_pages: bool = False) -> QuantizedRows:
    """Return the rows of a matrix, or of one expert of it, in their blocks, mapped from the file where they can be.

    holds_pages: wait until all their pages are mapped, so that `forget_pages` leaves them as long as the rows are used.
    Raise CheckpointError.
    """
    if expert is not None:
        tensor = _row_of(part.sources[0], expert)
        return _rounded(tensor) if part.partner else _packed(tensor, holds_pages=holds_pages)
    if len(part.kinds) > 1:
        rows = joined_rows([_rounded(source) for source in part.sources])
    else:
        rows = joined_rows([_packed(source, holds_pages=holds_pages) for source in part.sources])
    assert rows is not None, "all parts have one format"
    if part.arrangement == "columns_in_turns":
        return QuantizedRows(rows.format, rows.pieces, rows.depth, _turns(part.heads, rows.depth).argsort())
    order = _order(part)
    return rows if order is None else rows.rows(order)


def forget_pages(part: GgufPart, num_bytes: int) -> None:
    """Have the kernel drop the pages of a tensor's first bytes, but for those that are mapped."""
    for tensor in part.sources:
        length = min(num_bytes, tensor.num_bytes)
        num_bytes -= length
        try:
            with tensor.file.open("rb", 0) as file:
                os.posix_fadvise(file.fileno(), tensor.offset, length, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise CheckpointError(f"{tensor.file.name} cannot be read: {error}.") from None
        if not num_bytes:
            return


def _order(part: GgufPart) -> Tensor | None:
    """Return the order in which a checkpoint has the rows, None for theirs."""
    heads, num_rows = part.heads, part.shape[0]
    if part.arrangement == "pairs":
        # The first of all pairs of a head come before the second ones.
        return torch.arange(num_rows).view(heads.number, num_rows // heads.number // 2, 2).transpose(1, 2).flatten()
    if part.arrangement == "turns" or (part.arrangement == "logarithm" and heads.values):
        return _turns(heads, num_rows)
    if part.arrangement != "by_key_head":
        return None
    widths = [heads.key_dim, heads.key_dim, *2 * [heads.values * heads.value_dim]]
    rows = torch.arange(num_rows).split([heads.number * width for width in widths])
    return torch.cat([kind.view(heads.number, -1) for kind in rows], 1).flatten()


def _turns(heads: Heads, length: int) -> Tensor:
    """Return the places of rows or columns whose last ones are of value heads in turns, those of a key head together.

    Raise CheckpointError if there are fewer.
    """
    num_values = heads.number * heads.values * heads.value_dim
    if length < num_values:
        raise CheckpointError("A tensor of the GGUF file has fewer rows than there are value heads.")
    first, last = torch.arange(length).split([length - num_values, num_values])
    return torch.cat([first, last.view(heads.values, heads.number, -1).transpose(0, 1).flatten()])


def _row_of(tensor: GgufTensor, row: int) -> GgufTensor:
    """Return one index of the first dimension as a tensor of its own."""
    num_bytes = tensor.num_bytes // tensor.shape[0]
    return GgufTensor(tensor.file, tensor.kind, tensor.shape[1:], tensor.offset + row * num_bytes, num_bytes)


def _bytes(tensor: GgufTensor, *, holds_pages: bool = False) -> _Array:
    skipped = tensor.offset % mmap.ALLOCATIONGRANULARITY
    begin, length = tensor.offset - skipped, skipped + tensor.num_bytes
    try:
        with tensor.file.open("rb", 0) as file:
            # Private pages, which torch may write to; nothing does.
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=begin)
        # All of it is read now, instead of megabytes around each page that is touched.
        for first in range(0, length, _READ_AT_ONCE):
            mapped.madvise(mmap.MADV_WILLNEED, first, min(_READ_AT_ONCE, length - first))
        if holds_pages:
            with suppress(OSError):  # An older kernel.
                mapped.madvise(_POPULATE_READ)
        return np.frombuffer(mapped, np.uint8, tensor.num_bytes, skipped)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor.file.name} cannot be read: {error}.") from None


_PLAIN_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def _numbers(tensor: GgufTensor) -> Tensor:
    if tensor.kind in _PLAIN_DTYPES:
        return torch.from_numpy(_bytes(tensor).copy()).view(_PLAIN_DTYPES[tensor.kind]).view(tensor.shape)
    numbers = dequantize(_by_rows(tensor), GGMLQuantizationType[tensor.kind])
    return torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).view(tensor.shape)


def _by_rows(tensor: GgufTensor, *, holds_pages: bool = False) -> _Array:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
    return _bytes(tensor, holds_pages=holds_pages).reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)


def _packed(tensor: GgufTensor, *, holds_pages: bool = False) -> QuantizedRows:
    form = FORMATS.get(tensor.kind.lower())
    if form is None:
        return _rounded(tensor)
    return QuantizedRows(form, torch.from_numpy(_by_rows(tensor, holds_pages=holds_pages)), tensor.shape[-1])


def _rounded(tensor: GgufTensor) -> QuantizedRows:
    if tensor.kind == "Q8_0":
        return _packed(tensor)
    rounded = quantize(_numbers(tensor).float().numpy(), GGMLQuantizationType.Q8_0)
    return QuantizedRows(Q8_0, torch.from_numpy(rounded), tensor.shape[-1])
