"""The signature of a run of tokens: which experts they used, in few bytes, to be kept with a cached prefix. Pure.

A byte per layer and expert if that fits into MAX_SIGNATURE_BYTES, else as many of each layer's busiest experts as do:
an expert number (two bytes) and a byte each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from experts.predictor import Ids, ObservedStep

Float = NDArray[np.float32]

MAX_SIGNATURE_BYTES = 4096
_ENTRY = np.dtype([("expert", "<u2"), ("rate", "u1")])


def encode_signature(rates: Float) -> bytes:
    """rates: [L, E], the share of tokens that chose each expert, 0 … 1. What was chosen at all stays so, if it is kept.

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
    """[L, E] rates; 0 for what was not kept. ValueError for bytes that are no signature of these sizes."""
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
    """[L, E]: the rates of a path from those of its parts, each with its number of tokens.

    ValueError for no part, or one that is not of these sizes.
    """
    num_tokens = sum(count for count, _ in parts)
    if num_tokens <= 0:
        raise ValueError("a path of no tokens has no signature")
    rates: Float = np.zeros((num_layers, num_experts), np.float32)
    for count, data in parts:
        rates += decode_signature(data, num_layers, num_experts) * np.float32(count / num_tokens)
    return rates


def _num_kept(num_layers: int) -> int:
    """Experts per layer of a signature that does not hold all."""
    kept = MAX_SIGNATURE_BYTES // (num_layers * _ENTRY.itemsize)
    if not kept:
        raise ValueError(f"{num_layers} layers are too many for {MAX_SIGNATURE_BYTES} bytes")
    return kept


# Which experts each running request has used: one matrix per request. Pure.


_FIRST_ROWS = 8


class RequestProfiles:
    """Per running request the tokens that chose each expert of each layer, [L, E], older tokens counting less.

    Bounded by the requests that run: `end` forgets.
    """

    __slots__ = ("_counts", "_fade", "_free", "_row_of", "_tokens")

    def __init__(self, num_layers: int, num_experts: int, half_life: float | None = None) -> None:
        """half_life: in tokens of the request; None keeps all tokens alike."""
        self._fade = 1.0 if half_life is None else 2.0 ** (-1 / half_life)
        self._counts: Float = np.zeros((_FIRST_ROWS, num_layers, num_experts), np.float32)
        self._tokens: Float = np.zeros((_FIRST_ROWS, num_layers), np.float32)
        self._row_of: dict[int, int] = {}
        self._free = list(range(_FIRST_ROWS))

    def __contains__(self, request: int) -> bool:
        return request in self._row_of

    def rows(self, requests: Ids, layer: int) -> tuple[Float, Float]:
        """([T, E] counts, [T] tokens behind them) of a layer; zeros for a request that is not known."""
        rows = np.fromiter((self._row_of.get(request, -1) for request in requests.tolist()), np.int64, len(requests))
        known = rows >= 0
        counts = np.where(known[:, None], self._counts[rows, layer], 0)
        return counts, np.where(known, self._tokens[rows, layer], 0)

    def of(self, request: int) -> tuple[Float, Float]:
        """([L, E] counts, [L] tokens) of a known request."""
        row = self._row_of[request]
        return self._counts[row], self._tokens[row]

    def seed(self, request: int, rates: Float, num_tokens: float) -> None:
        """What its prefix used, before anything of the request is seen. rates: [L, E], worth `num_tokens` tokens.

        Of a layer without any rate nothing is known.
        """
        row = self._row(request)
        self._counts[row] = rates * np.float32(num_tokens)
        self._tokens[row] = np.where(rates.any(axis=1), np.float32(num_tokens), 0)

    def add(self, step: ObservedStep) -> None:
        """Counts a step, the layers of it that were observed."""
        if not step.ids or not len(step.requests):
            return
        requests, owner, num_tokens = np.unique(step.requests, return_inverse=True, return_counts=True)
        rows = np.fromiter((self._row(request) for request in requests.tolist()), np.int64, len(requests))
        layers = np.fromiter(step.ids, np.int64, len(step.ids))
        fade = (self._fade**num_tokens).astype(np.float32)
        self._counts[rows[:, None], layers] *= fade[:, None, None]
        self._tokens[rows[:, None], layers] *= fade[:, None]
        self._tokens[rows[:, None], layers] += num_tokens[:, None].astype(np.float32)
        chosen = np.stack([step.ids[layer] for layer in layers.tolist()])
        np.add.at(self._counts, (rows[owner][None, :, None], layers[:, None, None], chosen), np.float32(1))

    def end(self, requests: Iterable[int]) -> None:
        for request in requests:
            row = self._row_of.pop(request, None)
            if row is not None:
                self._counts[row] = 0
                self._tokens[row] = 0
                self._free.append(row)

    def _row(self, request: int) -> int:
        row = self._row_of.get(request)
        if row is None:
            if not self._free:
                size = len(self._counts)
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
                self._free = list(range(size, 2 * size))
            row = self._row_of[request] = self._free.pop()
        return row
