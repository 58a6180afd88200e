"""Placements by co-activation: experts that tokens choose together on one rank. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from experts.placement.balanced import load_balanced
from experts.placement.placement import Placement, contiguous, from_first_ranks, round_robin

Float = NDArray[np.float64]
Ids = NDArray[np.integer]
Load = NDArray[np.floating]
# [L, E] or [E]: the rank of each expert.
RankOf = NDArray[np.int64]

# Co-activation stops after this many exchanges without a better placement.
_PATIENCE = 8
# Held-out tokens are compared in this many runs, because neighbours choose alike.
_NUM_RUNS = 16
_STANDARD_ERRORS = 2.0
# Gains are whole tokens, computed in floating point.
_ONE_TOKEN = 0.5
# The cost of a unit of load above the bound, in tokens.
_OVERLOAD = 1e3


def coactivation_placement(
    routing: Ids, num_experts: int, num_ranks: int, *, max_load: float | None = 1.1
) -> Placement:
    """Place experts that tokens choose together on one rank, each layer by itself. Deterministic.

    A token costs one row per rank that it touches, so the number of distinct ranks is minimised. The load of a rank is
    bounded: with skewed routing, all popular experts on one rank would be the cheapest placement and the slowest.

    routing: [L, T, k], a sample of tokens in order (`RoutingStatistics.recent`). max_load: bound of a rank's load in
    units of the mean load; a layer that `load_balanced` leaves above it is bounded by the balanced load. None: the
    bound is the busiest rank's load in the plain placement, contiguous or round-robin, that touches fewer ranks.

    A placement is first learnt on half of the tokens. If it does not save ranks on the other half, the plain placement
    is returned.
    """
    plain = _better_plain(routing, num_experts, num_ranks)
    half = routing.shape[1] // 2
    if num_ranks == 1 or half < _NUM_RUNS:
        return from_first_ranks(plain, num_ranks)
    learnt = _fewest_ranks_touched(routing[:, :half], plain, plain, num_ranks, max_load)
    if not _helps(learnt, plain, routing[:, half:]):
        return from_first_ranks(plain, num_ranks)
    return from_first_ranks(_fewest_ranks_touched(routing, plain, learnt, num_ranks, max_load), num_ranks)


def _better_plain(routing: Ids, num_experts: int, num_ranks: int) -> RankOf:
    """[L, E]: contiguous or round-robin, whichever touches fewer ranks."""
    sizes = len(routing), num_experts, num_ranks
    plain = [build(*sizes).first_ranks() for build in (contiguous, round_robin)]
    touched = [_touches(rank_of, routing).sum() for rank_of in plain]
    return plain[int(np.argmin(touched))]


def _touches(rank_of: RankOf, routing: Ids) -> Float:
    """[T]: the ranks that each token touches, summed over layers. rank_of: [L, E]."""
    ranks = rank_of[np.arange(len(routing))[:, None, None], routing]
    changes = np.diff(np.sort(ranks, axis=2), axis=2) != 0
    return (1 + changes.sum(axis=2)).sum(axis=0, dtype=np.float64)


def _helps(learnt: RankOf, plain: RankOf, routing: Ids) -> bool:
    """Return True if the learnt placement touches fewer ranks by more than chance explains."""
    saved = _touches(plain, routing) - _touches(learnt, routing)
    of_runs = np.array([run.mean() for run in np.array_split(saved, _NUM_RUNS)])
    return float(of_runs.mean()) > _STANDARD_ERRORS * float(of_runs.std(ddof=1)) / _NUM_RUNS**0.5


def _fewest_ranks_touched(routing: Ids, plain: RankOf, start: RankOf, num_ranks: int, max_load: float | None) -> RankOf:
    """[L, E]: for each layer the best placement that exchanges reach from `start` or from balanced loads."""
    num_experts = plain.shape[1]
    load = np.stack([np.bincount(ids.reshape(-1), minlength=num_experts) for ids in routing]).astype(np.float64)
    balanced = load_balanced(load, num_ranks).first_ranks()
    found = np.empty_like(plain)
    for layer, ids in enumerate(routing):
        sets = token_sets(ids, num_experts, num_ranks)
        known = plain if max_load is None else balanced
        bound = max(
            (max_load or 1.0) * load[layer].sum() / num_ranks,
            float(np.bincount(known[layer], load[layer], num_ranks).max()),
        )
        ended = [fewest_ranks(sets, begin[layer], bound, _PATIENCE) for begin in (start, balanced)]
        found[layer] = min(ended, key=partial(cost, sets, bound=bound))
    return found


@dataclass(frozen=True, slots=True)
class TokenSets:
    """The distinct expert sets of a layer's tokens. ids: [N, k], ascending. weight: [N], tokens with the set."""

    num_experts: int
    num_ranks: int
    ids: NDArray[np.int64]
    weight: Float

    def load(self) -> Float:
        """[E]: tokens that choose the expert."""
        return summed_at(self.ids, self.weight, self.num_experts)

    def on_rank(self, rank_of: RankOf) -> NDArray[np.int64]:
        """[N, R]: the number of a set's experts on each rank."""
        size = len(self.ids) * self.num_ranks
        rows = np.arange(len(self.ids))[:, None] * self.num_ranks
        return np.bincount((rows + rank_of[self.ids]).reshape(-1), minlength=size).reshape(-1, self.num_ranks)

    def ranks_touched(self, rank_of: RankOf) -> float:
        """Return the number of distinct ranks, summed over tokens."""
        return float(self.weight @ (self.on_rank(rank_of) > 0).sum(axis=1))


def token_sets(ids: NDArray[np.integer], num_experts: int, num_ranks: int) -> TokenSets:
    """Return the sets of tokens. ids: [T, k], distinct within a token."""
    distinct, counts = np.unique(np.sort(ids, axis=1).astype(np.int64), axis=0, return_counts=True)
    return TokenSets(num_experts, num_ranks, distinct, counts.astype(np.float64))


def summed_at(cells: NDArray[np.int64], weight: Float, size: int) -> Float:
    """[size]: at each place the summed weight [N] of the rows of `cells` [N, M] that contain the place."""
    return np.bincount(cells.reshape(-1), np.repeat(weight, cells.shape[1]), size).astype(np.float64, copy=False)


class Exchanges:
    """A placement of one layer and the gain of every exchange of two experts. `make` mutates it.

    The number of distinct ranks per token is the connectivity of a hypergraph whose edges are the tokens' expert sets.
    The gains of all pairs are exact, and kept up to date by looking at no more than the tokens that choose one of the
    two experts (Fiduccia and Mattheyses' gains, for Kernighan and Lin's exchanges).

    _alone_with[e, f]: tokens that choose e and f and touch e's rank for e alone; the diagonal is the saving if e
    leaves its rank. _arriving[e, r]: tokens that choose e and do not touch rank r yet.
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

        A token that chooses both touches the same ranks afterwards, so `_alone_with` takes its saving back.
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
        """Add the contribution of these sets to both tables, or subtract it (sign -1.0)."""
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
    """Return the best placement [E] on a path of exchanges from `start`, which ends `patience` exchanges after it.

    The best exchange is made even if it loses, and its experts then rest for some steps (Glover's tabu search).
    bound: the bound of a rank's load. Load above it costs more than ranks touched, so it is removed first if possible.
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
    """Return the quantity that `fewest_ranks` minimises."""
    total = np.bincount(rank_of, sets.load(), sets.num_ranks)
    return sets.ranks_touched(rank_of) + _OVERLOAD * float(np.maximum(total - bound, 0).sum())


def _more_overload(rank_of: RankOf, load: Float, num_ranks: int, bound: float) -> Float:
    """[E, E]: load above the bound that an exchange adds."""
    total = np.bincount(rank_of, load, num_ranks)[rank_of]
    after = np.maximum((total - load)[:, None] + load - bound, 0) - np.maximum(total - bound, 0)[:, None]
    added: Float = after + after.T
    return added
