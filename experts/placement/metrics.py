"""What a placement costs on recorded routing: remote ranks, hops, balance. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement import Placement

Float = NDArray[np.float64]
Ids = NDArray[np.integer]


def remote_ranks(routing: Ids, homes: Ids, placement: Placement) -> Float:
    """[L]: the mean number of ranks other than its home to which a token is sent, each rank once.

    This is the number of rows per token that dispatch moves, one way. routing: [L, T, k]; homes: [T].
    """
    num_tokens = routing.shape[1]
    found = np.empty(len(routing))
    for layer, ids in enumerate(routing):
        touched = np.zeros((num_tokens, placement.num_ranks), np.bool_)
        np.put_along_axis(touched, placement.destinations(layer)[homes[:, None], ids], True, axis=1)
        touched[np.arange(num_tokens), homes] = False
        found[layer] = touched.sum() / num_tokens
    return found


def hops(first_choices: Ids, placement: Placement) -> float:
    """The share of layer transitions in which a token's first choice lies on another rank than the one before.

    ExFlow's metric (arXiv 2401.08383), for routing in which a token stays on its expert's rank. Where it returns
    home after every layer, as with data-parallel attention, count `remote_ranks`. first_choices: [L, T].
    """
    ranks = np.take_along_axis(placement.first_ranks(), first_choices.astype(np.int64), axis=1)
    return float((ranks[1:] != ranks[:-1]).mean())


def rank_load(load: NDArray[np.floating], placement: Placement, home_load: Float | None = None) -> Float:
    """[L, R]: the load that arrives at each rank.

    load: [L, E]. home_load: [R], the share of tokens at home on each rank, equal by default.
    """
    num_ranks = placement.num_ranks
    homes = np.full(num_ranks, 1 / num_ranks) if home_load is None else home_load
    found = np.zeros((placement.num_layers, num_ranks))
    for layer, of_experts in enumerate(load):
        np.add.at(found[layer], placement.destinations(layer), homes[:, None] * of_experts)
    return found


def balancedness(load: NDArray[np.floating], placement: Placement, home_load: Float | None = None) -> Float:
    """[L]: mean over maximum of the ranks' load; 1 is perfect, 1 / R is all on one rank. A layer without load has 1."""
    of_ranks = rank_load(load, placement, home_load)
    most = of_ranks.max(axis=1)
    return np.divide(of_ranks.mean(axis=1), most, out=np.ones(len(most)), where=most > 0)
