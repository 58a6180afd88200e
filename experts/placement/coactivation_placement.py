"""Placement by co-activation: experts that a token chooses together share a rank. Pure.

A token costs one row per rank that it touches, so what counts is the number of distinct ranks, home excluded. What is
found has to be better on tokens that it was not fitted to, and no rank may be busier than it would be anyway: in skewed
routing the popular experts on one rank would be the cheapest placement and the slowest.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from experts.placement.assignment import balanced_assignment
from experts.placement.exchange_search import cost, fewest_ranks
from experts.placement.load_balance import load_balanced
from experts.placement.placement import Placement, contiguous, from_first_ranks, round_robin
from experts.placement.token_sets import Float, RankOf, TokenSets, token_sets

Ids = NDArray[np.integer]

_PATIENCE = 8
# Of the held-out tokens, which are compared in runs because neighbours choose alike.
_NUM_RUNS = 16
_STANDARD_ERRORS = 2.0


def coactivation_placement(
    routing: Ids, num_experts: int, num_ranks: int, homes: Ids | None = None, *, max_load: float | None = 1.1
) -> Placement:
    """The fewest distinct ranks per token that exchanges find, each layer by itself. Deterministic.

    routing: [L, T, k], a sample of tokens in order (`RoutingStatistics.recent`). homes: [T]; worth telling where
    requests that choose alike live together, otherwise a home says nothing about experts. max_load: bound of a rank's
    load in units of the mean, or the best balance known where that is above it. None: what the busiest rank has in the
    plain placement, contiguous or round-robin, that touches fewer ranks.

    First it is learnt on half of the tokens. Where the other half does not show that it saves ranks, that plain
    placement is the answer.
    """
    plain = _better_plain(routing, num_experts, num_ranks, homes)
    half = routing.shape[1] // 2
    if num_ranks == 1 or half < _NUM_RUNS:
        return from_first_ranks(plain, num_ranks)
    seen, unseen = (None, None) if homes is None else (homes[:half], homes[half:])
    learnt = _learnt(routing[:, :half], plain, plain, num_ranks, seen, max_load)
    if not _helps(learnt, plain, routing[:, half:], num_ranks, unseen):
        return from_first_ranks(plain, num_ranks)
    return from_first_ranks(_learnt(routing, plain, learnt, num_ranks, homes, max_load), num_ranks)


def _better_plain(routing: Ids, num_experts: int, num_ranks: int, homes: Ids | None) -> RankOf:
    """[L, E]: contiguous or round-robin, whichever touches fewer ranks."""
    sizes = len(routing), num_experts, num_ranks
    plain = [build(*sizes).first_ranks() for build in (contiguous, round_robin)]
    touched = [_touches(rank_of, routing, num_ranks, homes).sum() for rank_of in plain]
    return plain[int(np.argmin(touched))]


def _touches(rank_of: RankOf, routing: Ids, num_ranks: int, homes: Ids | None) -> Float:
    """[T]: the ranks that each token touches, summed over layers. rank_of: [L, E]."""
    ranks = rank_of[np.arange(len(routing))[:, None, None], routing]
    if homes is not None:
        ranks = np.concatenate([ranks, np.broadcast_to(homes[:, None], (*ranks.shape[:2], 1))], axis=2)
    changes = np.diff(np.sort(ranks, axis=2), axis=2) != 0
    return (1 + changes.sum(axis=2)).sum(axis=0, dtype=np.float64)


def _helps(learnt: RankOf, plain: RankOf, routing: Ids, num_ranks: int, homes: Ids | None) -> bool:
    """Whether the tokens show more than chance that the learnt placement touches fewer ranks."""
    saved = _touches(plain, routing, num_ranks, homes) - _touches(learnt, routing, num_ranks, homes)
    of_runs = np.array([run.mean() for run in np.array_split(saved, _NUM_RUNS)])
    return float(of_runs.mean()) > _STANDARD_ERRORS * float(of_runs.std(ddof=1)) / _NUM_RUNS**0.5


def _learnt(
    routing: Ids, plain: RankOf, start: RankOf, num_ranks: int, homes: Ids | None, max_load: float | None
) -> RankOf:
    """[L, E]: layer by layer the best that exchanges lead to, from `start` and from balanced loads."""
    num_experts = plain.shape[1]
    load = np.stack([np.bincount(ids.reshape(-1), minlength=num_experts) for ids in routing]).astype(np.float64)
    balanced = load_balanced(load, num_ranks).first_ranks()
    found = np.empty_like(plain)
    for layer, ids in enumerate(routing):
        sets = token_sets(ids, num_experts, num_ranks, homes)
        known = plain if max_load is None else balanced
        bound = max(
            (max_load or 1.0) * load[layer].sum() / num_ranks,
            float(np.bincount(known[layer], load[layer], num_ranks).max()),
        )
        ended = [_refined(begin[layer], sets, bound) for begin in (start, balanced)]
        found[layer] = min(ended, key=partial(cost, sets, bound=bound))
    return found


def _refined(rank_of: RankOf, sets: TokenSets, bound: float) -> RankOf:
    """Exchanges, and where homes matter renaming of ranks, until neither gains."""
    if not (sets.homes >= 0).any():
        return fewest_ranks(sets, rank_of, bound, _PATIENCE)
    touched = sets.ranks_touched(rank_of)
    while True:
        rank_of = fewest_ranks(sets, _with_ranks_named(rank_of, sets), bound, _PATIENCE)
        now = sets.ranks_touched(rank_of)
        if now > touched - 0.5:
            return rank_of
        touched = now


def _with_ranks_named(rank_of: RankOf, sets: TokenSets) -> RankOf:
    """Gives each group of experts the rank where most of its tokens live. Exact."""
    visited = sets.on_rank(rank_of)
    visited[np.arange(len(sets.homes)), sets.homes] -= 1
    at_home = np.eye(sets.num_ranks)[sets.homes] * sets.weight[:, None]
    visits = (visited > 0).astype(np.float64).T @ at_home
    return balanced_assignment(visits, np.arange(sets.num_ranks))[rank_of]
