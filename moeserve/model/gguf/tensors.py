"""Reads the tensors of GGUF files where they lie.

Matrices keep their blocks: rows are taken and ordered without unpacking them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from kernels.weight_formats import FORMATS, QuantizedRows
from moeserve.model.gguf.header import GgufTensor
from moeserve.model.gguf.parts import PACKED_KINDS, GgufPart
from moeserve.model.spec import CheckpointError

_Array = np.ndarray[Any, np.dtype[Any]]


def read_part(part: GgufPart) -> Tensor:
    """Return the numbers of a tensor in its shape, float32 or as they are stored. Raise CheckpointError."""
    if part.arrangement == "latent":
        keys, values = (_numbers(source) for source in part.sources)
        return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)
    numbers = _numbers(part.sources[0])
    return numbers if part.arrangement == "plain" else numbers[_halves_from_pairs(len(numbers), part.heads)]


def read_row(part: GgufPart, row: int) -> Tensor:
    """Return `read_part(part)[row]` of a tensor of all experts. Raise CheckpointError."""
    return _numbers(_row_of(part.sources[0], row))


def read_packed(part: GgufPart, expert: int | None = None) -> QuantizedRows:
    """Return the rows of a matrix in their blocks, or those of one expert. Raise CheckpointError."""
    rows = _packed(part.sources[0] if expert is None else _row_of(part.sources[0], expert))
    if part.arrangement == "pairs":
        return rows.rows(_halves_from_pairs(rows.shape[0], part.heads))
    return rows


def _halves_from_pairs(num_rows: int, heads: int) -> Tensor:
    """Return the order of rows in which the first of all pairs of a head come before the second ones."""
    return torch.arange(num_rows).view(heads, num_rows // heads // 2, 2).transpose(1, 2).flatten()


def _row_of(tensor: GgufTensor, row: int) -> GgufTensor:
    """Return one index of the first dimension as a tensor of its own."""
    num_bytes = tensor.num_bytes // tensor.shape[0]
    return GgufTensor(tensor.file, tensor.kind, tensor.shape[1:], tensor.offset + row * num_bytes, num_bytes)


def _bytes(tensor: GgufTensor) -> _Array:
    try:
        return np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.num_bytes,))
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
    kind = GGMLQuantizationType[tensor.kind]
    try:
        numbers = dequantize(_by_rows(tensor), kind)
    except NotImplementedError:
        raise CheckpointError(f"Weights of kind {tensor.kind} in {tensor.file.name} cannot be read.") from None
    return torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).view(tensor.shape)


def _by_rows(tensor: GgufTensor) -> _Array:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.kind]]
    return _bytes(tensor).reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)


def _packed(tensor: GgufTensor) -> QuantizedRows:
    depth = tensor.shape[-1]
    if tensor.kind in PACKED_KINDS:
        return QuantizedRows(FORMATS[PACKED_KINDS[tensor.kind]], torch.from_numpy(_by_rows(tensor).copy()), depth)
    rounded = quantize(_numbers(tensor).float().numpy(), GGMLQuantizationType.Q8_0)
    return QuantizedRows(FORMATS["q8_0"], torch.from_numpy(rounded), depth)
