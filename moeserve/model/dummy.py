"""Models without weights: the numbers are drawn while they are read, the same on every device and machine.

A folder with a configuration and a file of the name DUMMY, which lists the tensors, is such a model
(`moeserve.model.sizes.write_dummy` writes it). It serves to measure, and to compare one device with another; its text
is noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from moeserve.model.stored import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

DUMMY = "dummy_weights.json"
# Numbers that are drawn at a time, 64 bits each: on a CPU they stay in its caches, which is 12 times as fast as
# going through memory; on a GPU few launches draw a tensor.
_AT_ONCE_ON_CPU, _AT_ONCE_ON_GPU = 1 << 16, 1 << 24
# Multiplier and shift of each round of lowbias32 (Wellons, "Prospecting for hash functions", 2018).
_ROUNDS = ((0x7FEB352D, 15), (0x846CA68B, 16))
_MASK = 0xFFFFFFFF
# The spread of vectors; those of norms and factors are near 1, others near 0.
_SMALL = 0.1
_FACTORS = ("scale", "scalar")


def is_dummy_folder(directory: Path) -> bool:
    return (directory / DUMMY).exists()


def write_dummy_index(index: Mapping[str, TensorInfo], directory: Path) -> None:
    """Write the tensors that a checkpoint in the folder would hold."""
    described = {name: [info.dtype, list(info.shape), info.num_bytes] for name, info in index.items()}
    (directory / DUMMY).write_text(json.dumps(described))


def dummy_index(directory: Path) -> dict[str, TensorInfo]:
    """Return the tensors by their names, as `moeserve.model.checkpoint.read_index` does."""
    file = directory / DUMMY
    described = json.loads(file.read_text())
    return {name: TensorInfo(file, dtype, tuple(shape), size) for name, (dtype, shape, size) in described.items()}


def is_dummy(info: TensorInfo) -> bool:
    return info.file.name == DUMMY


def draw_into(name: str, info: TensorInfo, out: Tensor, row: int | None = None) -> None:
    """Fill `out` with the numbers of a tensor, or of one row of its first dimension: uniform, of variance 1 / columns.

    Vectors are near 1 for norms and factors, and near 0 for others.
    """
    import torch  # Imported late: indices are read without it.

    columns = info.shape[-1]
    spread = (3 / columns) ** 0.5 if len(info.shape) > 1 else _SMALL
    centre = 1.0 if len(info.shape) == 1 and ("norm" in name or name.endswith(_FACTORS)) else 0.0
    seed = int.from_bytes(sha256(name.encode()).digest()[:4], "little")
    first = 0 if row is None else row * out.numel()
    drawn = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    flat = drawn.view(-1)
    at_once = _AT_ONCE_ON_CPU if out.device.type == "cpu" else _AT_ONCE_ON_GPU
    for begin in range(0, out.numel(), at_once):
        end = min(out.numel(), begin + at_once)
        numbers = torch.arange(first + begin, first + end, dtype=torch.int64, device=out.device)
        # Halves of the place are mixed one after the other: tensors may have more than 2**32 numbers.
        bits = _hashed(_hashed((numbers >> 32) ^ seed) ^ (numbers & _MASK))
        uniform = (bits >> 8).to(torch.float32) * (2.0 / (1 << 24)) - 1.0
        flat[begin:end] = uniform * spread + centre
    if drawn is not out:
        out.copy_(drawn)


def _hashed(bits: Tensor) -> Tensor:
    """Mix 32 bits, held in int64. A product of two of them may overflow; its low bits are right in any case."""
    bits = bits ^ (bits >> 16)
    for multiplier, shift in _ROUNDS:
        bits = (bits * multiplier) & _MASK
        bits = bits ^ (bits >> shift)
    return bits
