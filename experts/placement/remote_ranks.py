"""Counts to how many other ranks tokens are sent. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement import Placement


class RemoteRanks:
    """`num_sent` of `num_rows` rows (a token in a layer) times remote ranks, each rank once per row."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.num_sent = 0
        self._placement: Placement | None = None
        self._reached: NDArray[np.uint64] = np.zeros((0, 0, 0), np.uint64)

    def add(self, ids: NDArray[np.int16], home: int, placement: Placement) -> None:
        """ids: [L, T, k] of tokens at home on one rank, negative where a layer left a row out."""
        if placement is not self._placement:
            layers = range(placement.num_layers)
            ranks = np.stack([placement.destinations(layer) for layer in layers]).astype(np.uint64)
            self._placement, self._reached = placement, np.left_shift(np.uint64(1), ranks)
        away = self._reached[:, home] & ~np.left_shift(np.uint64(1), np.uint64(home))
        known = ids[..., 0] >= 0
        layer = np.arange(len(ids))[:, None, None]
        reached = np.bitwise_or.reduce(away[layer, ids], axis=2)[known]
        self.num_rows += len(reached)
        self.num_sent += int(np.bitwise_count(reached).sum())
