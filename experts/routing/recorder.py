"""Gathers routing into statistics a few steps at a time, so that a step pays next to nothing. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from experts.routing.statistics import RoutingStatistics

_STEPS_PER_DIGEST = 64
_ROWS_PER_DIGEST = 256


class RoutingRecorder:
    """Owns the statistics. Several steps are counted as one: no table looks from one token to another."""

    def __init__(self, statistics: RoutingStatistics) -> None:
        self._statistics = statistics
        self._ids: list[NDArray[np.int16]] = []
        self._token_ids: list[Sequence[int]] = []
        self._num_rows = 0
        self.num_tokens = 0

    def add(self, ids: NDArray[np.int16], token_ids: Sequence[int]) -> None:
        """Takes the routing of one rank's step: ids [L, T, k], NOT_COMPUTED where a layer left a row out."""
        self._ids.append(ids)
        self._token_ids.append(token_ids)
        self._num_rows += len(token_ids)
        self.num_tokens += len(token_ids)
        if len(self._ids) >= _STEPS_PER_DIGEST or self._num_rows >= _ROWS_PER_DIGEST:
            self._digest()

    def statistics(self) -> RoutingStatistics:
        """All that was added so far."""
        self._digest()
        return self._statistics

    def _digest(self) -> None:
        if self._ids:
            token_ids = np.concatenate([np.asarray(part, np.int64) for part in self._token_ids])
            self._statistics.update(np.concatenate(self._ids, axis=1), token_ids)
            self._ids, self._token_ids, self._num_rows = [], [], 0
