"""Which experts each running request has used: one matrix per request. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from experts.prediction.predictor import Ids, ObservedStep

Float = NDArray[np.float32]

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
