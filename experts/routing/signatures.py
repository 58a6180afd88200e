"""The signature of a run of tokens: which experts they used, in few bytes, kept with a cached prefix. Torch-free.

It has a byte per layer and expert if that fits into MAX_SIGNATURE_BYTES. Otherwise it has, for as many of each layer's
busiest experts as fit, an expert number (two bytes) and a byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]

MAX_SIGNATURE_BYTES = 4096
_ENTRY = np.dtype([("expert", "<u2"), ("rate", "u1")])


def encode_signature(rates: Float) -> bytes:
    """rates: [L, E], the share of tokens that chose each expert, 0 … 1. An expert that was chosen at all and is kept
    has a rate above 0.

    ValueError for more layers than there are bytes for.
    """
    num_layers = len(rates)
    levels = np.ceil(np.clip(rates, 0, 1) * np.float32(255)).astype(np.uint8)
    if levels.size <= MAX_SIGNATURE_BYTES:
        return levels.tobytes()
    kept = _num_kept(num_layers)
    busiest = np.argpartition(-levels.astype(np.int16), kept - 1, axis=1)[:, :kept]
    entries = np.empty((num_layers, kept), _ENTRY)
    entries["expert"] = busiest
    entries["rate"] = np.take_along_axis(levels, busiest, 1)
    return entries.tobytes()


def decode_signature(data: bytes, num_layers: int, num_experts: int) -> Float:
    """[L, E]: the rates, 0 for experts not kept. ValueError for bytes that are no signature of these sizes."""
    size = num_layers * num_experts
    dense = size <= MAX_SIGNATURE_BYTES
    expected = size if dense else num_layers * _num_kept(num_layers) * _ENTRY.itemsize
    if len(data) != expected:
        raise ValueError(f"a signature of {len(data)} bytes, expected {expected}")
    if dense:
        levels = np.frombuffer(data, np.uint8).reshape(num_layers, num_experts)
        return levels * np.float32(1 / 255)
    entries = np.frombuffer(data, _ENTRY).reshape(num_layers, -1)
    if int(entries["expert"].max()) >= num_experts:
        raise ValueError(f"a signature of more than {num_experts} experts")
    rates: Float = np.zeros((num_layers, num_experts), np.float32)
    np.put_along_axis(rates, entries["expert"].astype(np.int64), entries["rate"] * np.float32(1 / 255), 1)
    return rates


def merge_signatures(parts: Sequence[tuple[int, bytes]], num_layers: int, num_experts: int) -> Float:
    """[L, E]: the rates of a path from the signatures of its parts, each with its number of tokens.

    ValueError without a part, or for a part that is not of these sizes.
    """
    num_tokens = sum(count for count, _ in parts)
    if num_tokens <= 0:
        raise ValueError("a path of no tokens has no signature")
    rates: Float = np.zeros((num_layers, num_experts), np.float32)
    for count, data in parts:
        rates += decode_signature(data, num_layers, num_experts) * np.float32(count / num_tokens)
    return rates


def _num_kept(num_layers: int) -> int:
    """Return the number of experts per layer in a signature that does not hold all."""
    kept = MAX_SIGNATURE_BYTES // (num_layers * _ENTRY.itemsize)
    if not kept:
        raise ValueError(f"{num_layers} layers are too many for {MAX_SIGNATURE_BYTES} bytes")
    return kept
