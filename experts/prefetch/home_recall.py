"""How much gates know, counted on one rank of several."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from experts.prediction.predictor import Ids
from experts.prediction.recall import RecallSample
from experts.prefetch.gates_ahead import GatesAhead
from experts.prefetch.prefetcher import LayerListener

_MAX_ROWS = 8


class HomeRecall:
    """Around a listener that believes gates: counts what these say of the rows at home, at all distances.

    The listener itself hears of rows of all ranks, and not of the same in each layer.
    """

    def __init__(self, inner: LayerListener, gates: GatesAhead, recall: RecallSample) -> None:
        """gates: of the tap `EARLY`, those that the listener goes by."""
        self._inner = inner
        self._gates = gates
        self._recall = recall
        self._num_rows = 0
        self._is_counting = False
        self._chosen: dict[int, Ids] = {}

    @property
    def is_on(self) -> bool:
        return self._inner.is_on

    def begin_step(self, token_ids: NDArray[np.int64], requests: Ids) -> None:
        self._inner.begin_step(token_ids, requests)
        self._num_rows = len(token_ids)
        self._is_counting = self._inner.is_on and self._num_rows > 0 and self._recall.is_counting

    def chose(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        if not self._is_counting or len(x) != self._num_rows:
            return
        every = -(-self._num_rows // _MAX_ROWS)
        self._chosen[layer] = expert_ids[::every].cpu().numpy()
        for distance, logits in self._gates(layer, x[::every]):
            self._recall.rank(self._gates.name, layer, distance, logits)

    def returned(self, layer: int) -> None:
        """What is counted was said before."""

    def observe(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        self._inner.observe(layer, x, expert_ids, weights)

    def after_layer(self, layer: int, residual: Tensor) -> None:
        self._inner.after_layer(layer, residual)

    def end_step(self, ended_requests: Iterable[int]) -> None:
        if self._inner.is_on and self._num_rows:
            self._recall.end_step(self._chosen)
            self._chosen.clear()
        self._is_counting = False
        self._inner.end_step(ended_requests)
