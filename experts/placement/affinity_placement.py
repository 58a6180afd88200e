"""Placement by affinity between layers: a token's next expert should be where its last one was. Pure.

ExFlow's objective (arXiv 2401.08383): the fewest transitions between ranks, with equally many experts per rank and
layer. It is summed over pair counts, so that the work does not depend on how many tokens were seen. Two moves take
turns until neither gains: while its neighbours stay, the best ranks of one layer are an exact assignment; and the best
chain of single exchanges in all layers is found by dynamic programming. The objective says nothing about load, nor
about serving in which tokens return home after every layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experts.placement.assignment import balanced_assignment
from experts.placement.placement import Placement, from_first_ranks, round_robin

RankOf = NDArray[np.int64]
Counts = NDArray[np.float64]

_NUM_EXCHANGES = 32


def affinity_placement(
    transitions: NDArray[np.floating], num_ranks: int, *, num_starts: int = 8, num_kicks: int = 20, seed: int = 0
) -> Placement:
    """transitions: [L - 1, E, E] counts of expert i at layer l and j at l + 1. Deterministic.

    num_starts: placements grown from different layers, of which the best is taken further. num_kicks: how often a
    random run of layers is made anew, and kept if it is no worse. PlacementError if the ranks cannot share the experts
    equally.
    """
    counts = transitions.astype(np.float64)
    num_layers, num_experts = len(counts) + 1, counts.shape[1]
    even = round_robin(num_layers, num_experts, num_ranks).first_ranks()
    random = np.random.default_rng(seed)
    best, most = even, staying(even, counts)
    for attempt in range(num_starts + num_kicks):
        if attempt < num_starts:
            begin, end = 0, num_layers
        else:
            begin, end = np.sort(random.choice(num_layers + 1, 2, replace=False)).tolist()
        found = _renewed(best, begin, end, counts, random)
        stays = staying(found, counts)
        if stays >= most:
            best, most = found, stays
    return from_first_ranks(best, num_ranks)


def staying(rank_of: RankOf, transitions: NDArray[np.floating]) -> float:
    """The count of transitions within a rank. rank_of: [L, E]."""
    same = rank_of[:-1, :, None] == rank_of[1:, None, :]
    return float((transitions * same).sum())


def _renewed(rank_of: RankOf, begin: int, end: int, counts: Counts, random: np.random.Generator) -> RankOf:
    """With layers begin … end - 1 made anew: one at random, the others outwards from it, then all in turns."""
    found = rank_of.copy()
    origin = int(random.integers(begin, end))
    found[origin] = random.permutation(found[origin])
    for layer in range(origin + 1, end):
        found[layer] = balanced_assignment(_gain(found, layer, counts, after=False), found[layer])
    for layer in range(origin - 1, begin - 1, -1):
        found[layer] = balanced_assignment(_gain(found, layer, counts, before=False), found[layer])
    stays = staying(found, counts)
    while True:
        for layer in [*range(begin, end), *range(end - 2, begin - 1, -1)]:
            found[layer] = balanced_assignment(_gain(found, layer, counts), found[layer])
        found[begin:end] = _exchange_along(found, begin, end, counts)
        now = staying(found, counts)
        if now <= stays * (1 + 1e-9):
            return found
        stays = now


def _exchange_along(rank_of: RankOf, begin: int, end: int, counts: Counts) -> RankOf:
    """[end - begin, E]: the best of all placements that differ by at most one exchange in each of these layers.

    Experts that follow each other have to move together, which no layer does by itself. Of each layer the exchanges
    that cost least there are considered, and the best chain of them is found by dynamic programming.
    """
    num_ranks = int(rank_of[0].max()) + 1
    options = [_exchanges(rank_of[layer], _gain(rank_of, layer, counts)) for layer in range(begin, end)]
    places = [np.eye(num_ranks)[option] for option in options]
    best = np.zeros(len(options[0]))
    if begin > 0:
        best = np.einsum("ir,pir->p", counts[begin - 1].T @ np.eye(num_ranks)[rank_of[begin - 1]], places[0])
    before = []
    for step in range(1, len(options)):
        reached = counts[begin + step - 1].T @ places[step - 1]
        stays = best[:, None] + np.tensordot(reached, places[step], ((1, 2), (1, 2)))
        before.append(stays.argmax(axis=0))
        best = stays.max(axis=0)
    if end < len(rank_of):
        best = best + np.einsum("ir,pir->p", counts[end - 1] @ np.eye(num_ranks)[rank_of[end]], places[-1])
    chosen = [int(best.argmax())]
    for step in reversed(before):
        chosen.append(int(step[chosen[-1]]))
    return np.stack([option[index] for option, index in zip(options, reversed(chosen), strict=True)])


def _exchanges(rank_of: RankOf, gain: Counts) -> RankOf:
    """[N, E]: the placement as it is, then those after the exchanges that cost least while the neighbours stay."""
    here = np.take_along_axis(gain, rank_of[:, None], axis=1)
    there = gain[:, rank_of]
    cost = here + here.T - there - there.T
    cost[rank_of[:, None] == rank_of] = np.inf
    one, other = np.triu_indices(len(rank_of), 1)
    cost = cost[one, other]
    order = np.argsort(cost, kind="stable")[:_NUM_EXCHANGES]
    order = order[cost[order] < np.inf]
    options = np.repeat(rank_of[None], len(order) + 1, axis=0)
    rows = np.arange(1, len(order) + 1)
    options[rows, one[order]], options[rows, other[order]] = rank_of[other[order]], rank_of[one[order]]
    return options


def _gain(rank_of: RankOf, layer: int, counts: Counts, *, before: bool = True, after: bool = True) -> Counts:
    """[E, R]: transitions from the layer before and to the one after that stay, for each rank of each expert."""
    num_ranks = int(rank_of[0].max()) + 1
    gain = np.zeros((rank_of.shape[1], num_ranks))
    if before and layer > 0:
        gain += counts[layer - 1].T @ np.eye(num_ranks)[rank_of[layer - 1]]
    if after and layer < len(counts):
        gain += counts[layer] @ np.eye(num_ranks)[rank_of[layer + 1]]
    return gain
