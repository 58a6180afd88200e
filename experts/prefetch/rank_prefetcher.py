"""Predictions on one rank of several: they follow the rows at home, and hear of others that come to be computed."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from experts.memory.expert_memory import ExpertMemory
from experts.prediction.predictor import Ids
from experts.prediction.rank_predictor import RankPredictor
from experts.prefetch.gates_ahead import GatesAhead
from experts.prefetch.prefetcher import Prefetcher

_NOBODY = np.empty((0, 1), np.int64)


class RankPrefetcher:
    """Hears in two ways: as `HomeListener` of the rows at home, as `LayerListener` of those that are computed here.

    The first are what the prefetcher is told, once the loads that the layer needs have begun; the predictor hears of
    both. Steps are followed from `begin_step` to `end_step` alone.
    """

    def __init__(
        self, memory: ExpertMemory, prefetcher: Prefetcher, predictor: RankPredictor, gates: GatesAhead | None
    ) -> None:
        """predictor: the prefetcher's. gates: of the tap `EARLY`, asked of rows that come; None if gates are not."""
        self._memory = memory
        self._prefetcher = prefetcher
        self._predictor = predictor
        self._gates = gates
        self._is_in_step = False
        self._home: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def is_on(self) -> bool:
        return self._prefetcher.is_on

    def begin_step(self, token_ids: NDArray[np.int64], requests: Ids) -> None:
        self._is_in_step = True
        self._prefetcher.begin_step(token_ids, requests)

    def chose(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        if self._is_in_step:
            self._home = x, expert_ids, weights

    def observe(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        self._tell(layer, x, expert_ids.cpu().numpy())

    def returned(self, layer: int) -> None:
        self._tell(layer, None, _NOBODY)

    def after_layer(self, layer: int, residual: Tensor) -> None:
        if self._is_in_step:
            self._prefetcher.after_layer(layer, residual)

    def end_step(self, ended_requests: Iterable[int]) -> None:
        self._is_in_step = False
        self._prefetcher.end_step(ended_requests)

    def _tell(self, layer: int, x: Tensor | None, computed: Ids) -> None:
        """Once in a layer. x [M, H], computed [M, k]: the rows that are computed here, and what they chose."""
        home, self._home = self._home, None
        if home is None:
            return
        started = time.perf_counter()
        self._predictor.visited(layer, home[1].cpu().numpy(), computed)
        if x is not None and self._gates is not None and self._predictor.wants_gates_of_computed():
            for distance, logits in self._gates(layer, x):
                self._predictor.observe_gate_of_computed(layer, distance, logits)
        self._memory.predictor_seconds += time.perf_counter() - started
        self._prefetcher.observe(layer, *home)
