"""Rows of ggml's kinds that have no format here, in formats that hold the same values.

The blocks are those of ggml's `block_iq4_nl`, `block_iq4_xs` and `block_q3_K`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernels.weight_formats import Q6_K, Q8_0, QuantizedRows, rows_of_codes

_Array = np.ndarray[Any, np.dtype[Any]]

# The values of codes of 4 bits in IQ4_NL and IQ4_XS; by byte, those of its low and of its high half.
_VALUES = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)
_LOW, _HIGH = np.tile(_VALUES, 16), np.repeat(_VALUES, 16)


def recode(kind: str, rows: _Array, depth: int) -> QuantizedRows | None:
    """Return rows of blocks, uint8 [N, bytes], in a format that holds their values; None if none does.

    depth: weights of a row.
    """
    recoder = _RECODERS.get(kind)
    return None if recoder is None else recoder(rows, depth)


def _iq4_nl(rows: _Array, depth: int) -> QuantizedRows:
    blocks = rows.reshape(len(rows), -1, 18)
    out = np.empty((*blocks.shape[:2], 34), np.uint8)
    out[..., :2] = blocks[..., :2]
    _expand(blocks[..., 2:], out[..., 2:].view(np.int8))
    return QuantizedRows(Q8_0, torch.from_numpy(out).flatten(1), depth)


def _iq4_xs(rows: _Array, depth: int) -> QuantizedRows:
    """A superblock of 256: d, two high bits and four low ones of eight scales, and the codes of eight blocks."""
    blocks = rows.reshape(len(rows), -1, 136)
    high = blocks[..., 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).reshape(high.shape)
    scales = (low | high << 4).astype(np.float32) - 32
    scales *= blocks[..., :2].copy().view("<f2").astype(np.float32)
    codes = np.empty((*blocks.shape[:2], 8, 32), np.int8)
    _expand(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16), codes)
    return rows_of_codes(torch.from_numpy(codes).flatten(1), torch.from_numpy(scales).flatten(1))


def _expand(halves: _Array, out: _Array) -> None:
    """Fill `out` [..., 32] with the values of the low halves of bytes [..., 16], then of the high ones."""
    np.take(_LOW, halves, out=out[..., :16])
    np.take(_HIGH, halves, out=out[..., 16:])


def _q3_k(rows: _Array, depth: int) -> QuantizedRows:
    """A superblock of 256: third bits of codes, two low ones, sixteen scales of 6 bits, d. Q6_K has codes of 6 bits and
    scales of 8, one for as many weights."""
    blocks = rows.reshape(len(rows), -1, 110)
    shape = blocks.shape[:2]
    first = blocks[..., 32:96].reshape(*shape, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    third = blocks[..., :32].reshape(*shape, 1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(2, 4, 1) & 1
    codes = first + (third << 2) + 28  # Of weights from -4 to 3, above the 32 of Q6_K.
    out = np.empty((*shape, 210), np.uint8)
    out[..., :128] = (codes[..., :2, :] & 15 | codes[..., 2:, :] << 4).reshape(*shape, 128)
    high = codes >> 4
    out[..., 128:192] = (high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6).reshape(
        *shape, 64
    )
    low = np.concatenate([blocks[..., 96:104] & 15, blocks[..., 96:104] >> 4], -1)
    above = blocks[..., None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    out[..., 192:208] = (low | above.reshape(*shape, 16) << 4) - 32
    out[..., 208:] = blocks[..., 108:]
    return QuantizedRows(Q6_K, torch.from_numpy(out).flatten(1), depth)


_RECODERS: dict[str, Callable[[_Array, int], QuantizedRows]] = {"IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "Q3_K": _q3_k}
