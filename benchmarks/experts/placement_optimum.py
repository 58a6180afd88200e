"""The best of all placements of a few experts, by ExFlow's objective and by ranks touched. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement import Placement, from_first_ranks
from experts.placement.token_sets import token_sets


def most_staying(transitions: NDArray[np.float64], num_ranks: int) -> float:
    """The largest count of transitions within a rank that any placement with equal shares has.

    transitions: [L - 1, E, E]. Exact: from layer to layer over all ways to share the experts of a layer, of which
    there are E! / (E / R)! ** R; integer programming finds the same and takes far longer.
    """
    num_experts = transitions.shape[1]
    places = np.eye(num_ranks)[np.array(list(_shares(range(num_experts), num_ranks)))]
    flat = places.reshape(len(places), -1)
    best = np.zeros(len(places))
    for counts in transitions:
        stays = np.einsum("ij,pir->pjr", counts, places).reshape(len(places), -1) @ flat.T
        best = (best[:, None] + stays).max(axis=0)
    return float(best.max())


def fewest_touched(routing: NDArray[np.integer], num_experts: int, num_ranks: int) -> Placement:
    """The placement under which tokens touch the fewest ranks, whatever load that gives them. routing: [L, T, k].

    Exact: each layer by itself, over all ways to share its experts.
    """
    shares = np.array(list(_shares(range(num_experts), num_ranks)))
    # The names of ranks do not matter: each takes its first expert after the one before has.
    first = [(share[:, None] == np.arange(num_ranks)).argmax(axis=0) for share in shares]
    shares = shares[[bool((np.diff(of_share) > 0).all()) for of_share in first]]
    best = []
    for ids in routing:
        sets = token_sets(ids, num_experts, num_ranks)
        best.append(min(shares, key=sets.ranks_touched))
    return from_first_ranks(np.stack(best), num_ranks)


def _shares(experts: Sequence[int], num_ranks: int) -> Iterator[list[int]]:
    """The rank of each expert, in every way that gives all ranks equally many."""
    share = len(experts) // num_ranks

    def fill(left: tuple[int, ...], rank: int, ranks: list[int]) -> Iterator[list[int]]:
        if not left:
            yield ranks.copy()
            return
        for chosen in combinations(left, share):
            for expert in chosen:
                ranks[expert] = rank
            yield from fill(tuple(expert for expert in left if expert not in chosen), rank + 1, ranks)

    yield from fill(tuple(experts), 0, [0] * len(experts))
