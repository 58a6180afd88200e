"""On one rank of several: predictions that follow the rows at home, and hear of others that come to be computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from experts.memory.expert_memory import ExpertMemory
from experts.prediction.predictor import Ids
from experts.prediction.rank_predictor import RankPredictor
from experts.prefetch.prefetcher import Prefetcher
from experts.routing_tap import Dispatch, Experts
from kernels.activation import Activation

_NOBODY = np.empty((0, 1), np.int64)


class HomeListener(Protocol):
    """Hears of the rows at home in each layer."""

    def chose(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        """The gate chose for the rows at home, x [T, H], expert_ids and weights [T, k]; they have not travelled yet."""

    def returned(self, layer: int) -> None:
        """They are back, and what other ranks sent is computed."""


class HomeRows:
    """Tells a listener of the rows that this rank sends to the experts of all ranks, itself included.

    num_elsewhere(layer): how many rows other ranks have in the layer, in the step that runs.
    """

    def __init__(self, moe_layers: Sequence[int], num_elsewhere: Callable[[int], int]) -> None:
        """moe_layers: numbers of the layers with experts, ascending; the listener counts these alone."""
        self._place = {layer: place for place, layer in enumerate(moe_layers)}
        self.num_elsewhere = num_elsewhere
        self.listener: HomeListener | None = None

    def around(self, dispatch_of: Callable[[int], Dispatch[Experts]]) -> Callable[[int], Dispatch[Experts]]:
        """The same dispatches, told of."""
        return lambda layer: self._around_one(self._place[layer], dispatch_of(layer))

    def _around_one(self, place: int, inner: Dispatch[Experts]) -> Dispatch[Experts]:
        def dispatch(
            x: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts, activation: Activation
        ) -> Tensor:
            listener = self.listener
            if listener is None:
                return inner(x, expert_ids, weights, experts, activation)
            listener.chose(place, x, expert_ids, weights)
            out = inner(x, expert_ids, weights, experts, activation)
            listener.returned(place)
            return out

        return dispatch


class RankPrefetcher:
    """Hears in two ways: as `HomeListener` of the rows at home, as `LayerListener` of those that are computed here.

    The first are what the prefetcher is told, once the loads that the layer needs have begun; of the others the
    predictor counts what they came for. Steps are followed from `begin_step` to `end_step` alone.
    """

    def __init__(self, memory: ExpertMemory, prefetcher: Prefetcher, predictor: RankPredictor) -> None:
        """predictor: the prefetcher's."""
        self._memory = memory
        self._prefetcher = prefetcher
        self._predictor = predictor
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
        self._tell(layer, expert_ids.cpu().numpy())

    def returned(self, layer: int) -> None:
        self._tell(layer, _NOBODY)

    def after_layer(self, layer: int, residual: Tensor) -> None:
        if self._is_in_step:
            self._prefetcher.after_layer(layer, residual)

    def end_step(self, ended_requests: Iterable[int]) -> None:
        self._is_in_step = False
        self._prefetcher.end_step(ended_requests)

    def _tell(self, layer: int, computed: Ids) -> None:
        """Once in a layer. computed: what the rows that are computed here chose."""
        home, self._home = self._home, None
        if home is None:
            return
        self._prefetcher.observe(layer, *home)
        started = time.perf_counter()
        self._predictor.visited(layer, computed)
        self._memory.predictor_seconds += time.perf_counter() - started
