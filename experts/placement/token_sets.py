"""The expert sets of a layer's tokens, and how many ranks they touch. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RankOf = NDArray[np.int64]
Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenSets:
    """Distinct sets only. ids: [N, k], ascending; weight: [N] tokens with the set.

    homes: [N], the rank that the tokens touch in any case; -1 where it is not told.
    """

    num_experts: int
    num_ranks: int
    ids: NDArray[np.int64]
    weight: Float
    homes: NDArray[np.int64]

    def load(self) -> Float:
        """[E]: tokens that choose the expert."""
        return summed_at(self.ids, self.weight, self.num_experts)

    def on_rank(self, rank_of: RankOf) -> NDArray[np.int64]:
        """[N, R]: what keeps a set on a rank: its experts there, and its home."""
        size = len(self.ids) * self.num_ranks
        rows = np.arange(len(self.ids))[:, None] * self.num_ranks
        found = np.bincount((rows + rank_of[self.ids]).reshape(-1), minlength=size).reshape(-1, self.num_ranks)
        known = self.homes >= 0
        found[known, self.homes[known]] += 1
        return found

    def ranks_touched(self, rank_of: RankOf) -> float:
        """Summed over tokens, home included where it is told."""
        return float(self.weight @ (self.on_rank(rank_of) > 0).sum(axis=1))


def token_sets(
    ids: NDArray[np.integer], num_experts: int, num_ranks: int, homes: NDArray[np.integer] | None = None
) -> TokenSets:
    """ids: [T, k], distinct within a token. homes: [T]."""
    keyed = np.column_stack([np.sort(ids, axis=1).astype(np.int64), np.full(len(ids), -1) if homes is None else homes])
    distinct, counts = np.unique(keyed, axis=0, return_counts=True)
    return TokenSets(num_experts, num_ranks, distinct[:, :-1], counts.astype(np.float64), distinct[:, -1])


def summed_at(cells: NDArray[np.int64], weight: Float, size: int) -> Float:
    """[size]: the weights of the rows [N] in whose cells [N, M] the place occurs."""
    return np.bincount(cells.reshape(-1), np.repeat(weight, cells.shape[1]), size).astype(np.float64, copy=False)
