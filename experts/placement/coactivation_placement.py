"""Placement by co-activation: experts that a token chooses together share a rank. Pure.

A token costs one row per rank that it touches, so what counts is the number of distinct ranks, not of pairs: a cut of
a hypergraph whose edges are the expert sets of tokens. Exchanges of two experts are rated exactly for all pairs at
once, and made in passes that look through a few losses (Kernighan and Lin's passes on the connectivity that Fiduccia
and Mattheyses count). No exchange may push the load of a rank above a bound, for in skewed routing the popular experts
on one rank would be the cheapest placement and the slowest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.placement.assignment import balanced_assignment
from experts.placement.load_balance import load_balanced
from experts.placement.placement import Placement, contiguous, from_first_ranks, round_robin

RankOf = NDArray[np.int64]
Float = NDArray[np.float32]

_PATIENCE = 8


@dataclass(frozen=True, slots=True)
class _TokenSets:
    """The distinct expert sets of a layer. member: [N, E] of 0 and 1; weight: [N] tokens with the set.

    at_home: [N, R] of 0 and 1, the rank that the tokens touch in any case; all 0 where homes are not told.
    """

    member: Float
    weight: Float
    at_home: Float

    def load(self) -> Float:
        return self.weight @ self.member

    def on_rank(self, rank_of: RankOf) -> Float:
        """[N, R]: what keeps a set on a rank: its experts there, and its home."""
        return self.member @ np.eye(self.at_home.shape[1], dtype=np.float32)[rank_of] + self.at_home


def coactivation_placement(
    routing: NDArray[np.integer],
    num_experts: int,
    num_ranks: int,
    homes: NDArray[np.integer] | None = None,
    *,
    max_load: float = 1.1,
    num_starts: int = 4,
    seed: int = 0,
) -> Placement:
    """The fewest distinct ranks per token that exchanges find, each layer by itself. Deterministic.

    routing: [L, T, k], a sample of tokens (`RoutingStatistics.recent`). homes: [T]; worth telling where requests that
    choose alike live together, otherwise a home says nothing about experts. max_load: bound of a rank's load in units
    of the mean; where the best balance known is above it, that one is the bound.
    """
    num_layers = len(routing)
    load = np.stack([np.bincount(ids.reshape(-1), minlength=num_experts) for ids in routing]).astype(np.float64)
    balanced = load_balanced(load, num_ranks).first_ranks()
    even = [
        contiguous(num_layers, num_experts, num_ranks).first_ranks(),
        round_robin(num_layers, num_experts, num_ranks).first_ranks(),
    ]
    random = np.random.default_rng(seed)
    found = np.empty_like(balanced)
    for layer, ids in enumerate(routing):
        sets = _token_sets(ids, num_experts, num_ranks, homes)
        bound = max(max_load * load[layer].sum() / num_ranks, np.bincount(balanced[layer], load[layer]).max())
        starts = [_grouped(sets, num_ranks, bound), balanced[layer], even[0][layer], even[1][layer]]
        starts += [random.permutation(even[0][layer]) for _ in range(num_starts - len(starts))]
        found[layer] = _best_of(starts[:num_starts], sets, bound)
    return from_first_ranks(found, num_ranks)


def _token_sets(
    ids: NDArray[np.integer], num_experts: int, num_ranks: int, homes: NDArray[np.integer] | None
) -> _TokenSets:
    keyed = np.sort(ids, axis=1).astype(np.int64)
    if homes is not None:
        keyed = np.column_stack([keyed, homes])
    distinct, counts = np.unique(keyed, axis=0, return_counts=True)
    member = np.zeros((len(distinct), num_experts), np.float32)
    np.put_along_axis(member, distinct[:, : ids.shape[1]], 1, axis=1)
    at_home = np.zeros((len(distinct), num_ranks), np.float32)
    if homes is not None:
        at_home[np.arange(len(distinct)), distinct[:, -1]] = 1
    return _TokenSets(member, counts.astype(np.float32), at_home)


def _grouped(sets: _TokenSets, num_ranks: int, bound: float) -> RankOf:
    """Rank by rank the busiest expert left, then those chosen most together with what the rank has."""
    together = sets.member.T @ (sets.member * sets.weight[:, None])
    load = sets.load()
    rank_of = np.full(len(load), num_ranks - 1)
    free = np.ones(len(load), np.bool_)
    for rank in range(num_ranks - 1):
        held: list[int] = []
        for _ in range(len(load) // num_ranks):
            score = together[held].sum(axis=0) if held else load
            heavy = load[held].sum() + load > bound
            # Where nothing fits under the bound, the lightest.
            score = np.where(heavy, -load, score) if held else score
            held.append(int(np.where(free, score, -np.inf).argmax()))
            free[held[-1]] = False
        rank_of[held] = rank
    return rank_of


def _best_of(starts: list[RankOf], sets: _TokenSets, bound: float) -> RankOf:
    """The start that ends with the fewest touches; those that end above the bound come last."""
    load = sets.load()
    ended = [_refine(start, sets, bound) for start in starts]
    cost = [
        (max(float(np.bincount(rank_of, load).max()) - bound, 0.0), _ranks_touched(rank_of, sets)) for rank_of in ended
    ]
    return ended[min(range(len(ended)), key=lambda index: cost[index])]


def _ranks_touched(rank_of: RankOf, sets: _TokenSets) -> float:
    return float(sets.weight @ (sets.on_rank(rank_of) > 0).sum(axis=1))


def _refine(rank_of: RankOf, sets: _TokenSets, bound: float) -> RankOf:
    """Passes of exchanges, and of renaming ranks where homes matter, until neither gains."""
    touched = _ranks_touched(rank_of, sets)
    while True:
        rank_of = _exchange_pass(_name_ranks(rank_of, sets), sets, bound)
        now = _ranks_touched(rank_of, sets)
        if now > touched - 0.5:
            return rank_of
        touched = now


def _name_ranks(rank_of: RankOf, sets: _TokenSets) -> RankOf:
    """Gives each group of experts the rank where most of its tokens live. Exact."""
    num_ranks = sets.at_home.shape[1]
    experts_there = sets.on_rank(rank_of) - sets.at_home
    visits = (experts_there > 0).astype(np.float64).T @ (sets.at_home * sets.weight[:, None])
    return balanced_assignment(visits, np.arange(num_ranks))[rank_of]


def _exchange_pass(rank_of: RankOf, sets: _TokenSets, bound: float) -> RankOf:
    """The best that a run of exchanges passes through, no expert moving twice.

    An exchange is also made when it loses, for several together may gain; the run ends a few after its best.
    """
    rank_of = rank_of.copy()
    best, gained, most, since = rank_of.copy(), 0.0, 0.0, 0
    load = sets.load()
    moved = np.zeros(len(rank_of), np.bool_)
    while since < _PATIENCE:
        gain = _exchange_gain(rank_of, sets)
        gain[moved] = gain[:, moved] = -np.inf
        gain[_exceeds(rank_of, load, sets.at_home.shape[1], bound)] = -np.inf
        one, other = np.unravel_index(gain.argmax(), gain.shape)
        if gain[one, other] == -np.inf:
            break
        gained += float(gain[one, other])
        rank_of[[one, other]] = rank_of[[other, one]]
        moved[[one, other]] = True
        since += 1
        if gained > most + 0.5:
            best, most, since = rank_of.copy(), gained, 0
    return best


def _exceeds(rank_of: RankOf, load: Float, num_ranks: int, bound: float) -> NDArray[np.bool_]:
    """[E, E]: exchanges that push the heavier of the two ranks above the bound and above what it had."""
    total = np.bincount(rank_of, load, minlength=num_ranks)[rank_of]
    moved = load[None, :] - load[:, None]
    after = np.maximum(total[:, None] + moved, total[None, :] - moved)
    return after > np.maximum(bound, np.maximum(total[:, None], total[None, :]))


def _exchange_gain(rank_of: RankOf, sets: _TokenSets) -> NDArray[np.float64]:
    """[E, E]: rank touches saved if e and f change places; -inf within a rank.

    Leaving saves a touch where nothing but e keeps the token there, arriving costs one where nothing did. A token
    with both touches the same ranks afterwards: what leaving seemed to save there is taken back.
    """
    on_rank = sets.on_rank(rank_of)
    weighted = sets.member * sets.weight[:, None]
    alone = weighted * (on_rank[:, rank_of] == 1)
    leaving = alone.sum(axis=0, dtype=np.float64)
    arriving = (weighted.T @ (on_rank == 0).astype(np.float32)).astype(np.float64)[:, rank_of]
    together = (alone.T @ sets.member).astype(np.float64)
    gain = leaving[:, None] + leaving[None, :] - arriving - arriving.T - together - together.T
    gain[rank_of[:, None] == rank_of[None, :]] = -np.inf
    return gain
