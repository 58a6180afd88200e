"""Exchanges of experts between ranks until tokens touch as few ranks as they can. Pure.

The number of distinct ranks per token is the connectivity of a hypergraph whose edges are the tokens' expert sets. What
every exchange of two experts would gain is known exactly for all pairs at once, and kept up to date by looking at no
more than the tokens that choose one of the two (Fiduccia and Mattheyses' gains, for Kernighan and Lin's exchanges). The
best one is made even if it loses, and its experts then rest for some steps (Glover's tabu search).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experts.placement.token_sets import Float, RankOf, TokenSets, summed_at

_ONE_TOKEN = 0.5
_OVERLOAD = 1e3


class Exchanges:
    """A placement of one layer and what each exchange would gain. `make` mutates it.

    alone_with[e, f]: tokens with both of which e is the only thing on its rank; the diagonal is what e's leaving saves.
    arriving[e, r]: tokens of e that touch nothing on rank r yet.
    """

    def __init__(self, sets: TokenSets, rank_of: RankOf) -> None:
        self.rank_of = rank_of.copy()
        self._sets = sets
        self._on_rank = sets.on_rank(rank_of)
        self._alone_with = np.zeros((sets.num_experts, sets.num_experts))
        self._arriving = np.zeros((sets.num_experts, sets.num_ranks))
        order = np.argsort(sets.ids.reshape(-1), kind="stable") // sets.ids.shape[1]
        ends = np.cumsum(np.bincount(sets.ids.reshape(-1), minlength=sets.num_experts))
        self._sets_of = np.split(order, ends[:-1])
        self._count(np.arange(len(sets.ids)), 1.0)

    def gain(self) -> Float:
        """[E, E]: rank touches saved if e and f change places; meaningless within a rank.

        A token with both touches the same ranks afterwards: what leaving seemed to save there is taken back.
        """
        half = self._alone_with.diagonal()[:, None] - self._arriving[:, self.rank_of] - self._alone_with
        return half + half.T

    def make(self, one: int, other: int) -> None:
        chosen = np.unique(np.concatenate([self._sets_of[one], self._sets_of[other]]))
        self._count(chosen, -1.0)
        ids = self._sets.ids[chosen]
        moved = (ids == one).sum(axis=1) - (ids == other).sum(axis=1)
        here, there = self.rank_of[[one, other]]
        self._on_rank[chosen, here] -= moved
        self._on_rank[chosen, there] += moved
        self.rank_of[[one, other]] = there, here
        self._count(chosen, 1.0)

    def _count(self, chosen: NDArray[np.int64], sign: float) -> None:
        """Adds what these sets contribute to both tables, or takes it away."""
        size, num_ranks = self._sets.num_experts, self._sets.num_ranks
        ids, weight = self._sets.ids[chosen], sign * self._sets.weight[chosen]
        on_rank = self._on_rank[chosen]
        row, place = np.nonzero(np.take_along_axis(on_rank, self.rank_of[ids], axis=1) == 1)
        cells = ids[row, place][:, None] * size + ids[row]
        self._alone_with += summed_at(cells, weight[row], size * size).reshape(size, size)
        row, rank = np.nonzero(on_rank == 0)
        cells = ids[row] * num_ranks + rank[:, None]
        self._arriving += summed_at(cells, weight[row], size * num_ranks).reshape(size, num_ranks)


def fewest_ranks(sets: TokenSets, start: RankOf, bound: float, patience: int) -> RankOf:
    """The best placement [E] on the way from `start`, which ends `patience` exchanges after it.

    bound: of the load of a rank. What is above it weighs more than any rank touched, so it goes first if it can.
    """
    exchanges = Exchanges(sets, start)
    load = sets.load()
    best, gained, most, since = start, 0.0, 0.0, 0
    rests_until = np.zeros(sets.num_experts, np.int64)
    tenure = max(2, sets.num_experts // 8)
    for step in range(1, 100 * sets.num_experts):
        gain = exchanges.gain() - _OVERLOAD * _more_overload(exchanges.rank_of, load, sets.num_ranks, bound)
        gain[exchanges.rank_of[:, None] == exchanges.rank_of] = -np.inf
        resting = rests_until >= step
        gain[(resting[:, None] | resting) & (gained + gain < most + _ONE_TOKEN)] = -np.inf
        one, other = divmod(int(gain.argmax()), sets.num_experts)
        if gain[one, other] == -np.inf:
            break
        gained += float(gain[one, other])
        exchanges.make(one, other)
        rests_until[[one, other]] = step + tenure
        since += 1
        if gained > most + _ONE_TOKEN:
            best, most, since = exchanges.rank_of.copy(), gained, 0
        elif since == patience:
            break
    return best


def cost(sets: TokenSets, rank_of: RankOf, bound: float) -> float:
    """What `fewest_ranks` makes least."""
    total = np.bincount(rank_of, sets.load(), sets.num_ranks)
    return sets.ranks_touched(rank_of) + _OVERLOAD * float(np.maximum(total - bound, 0).sum())


def _more_overload(rank_of: RankOf, load: Float, num_ranks: int, bound: float) -> Float:
    """[E, E]: load above the bound that an exchange adds."""
    total = np.bincount(rank_of, load, num_ranks)[rank_of]
    after = np.maximum((total - load)[:, None] + load - bound, 0) - np.maximum(total - bound, 0)[:, None]
    added: Float = after + after.T
    return added
