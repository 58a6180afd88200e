"""A layer's placement made more even by few moves, for a service that has to load what moves. Pure.

`load_balance` places a layer from nothing and would move most of it each time. Here the heaviest rank exchanges an
expert with another rank, or is given relief by a replica that replaces another one, as long as the heaviest load falls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from experts.placement.load_balance import ordered_ranks
from experts.placement.placement import Ranks, destinations_of

Float = NDArray[np.float64]


def load_shares(ranks: Sequence[Ranks], num_ranks: int) -> Float:
    """[E, R]: the share of an expert's load that arrives at each rank if tokens are at home on all ranks equally."""
    shares = np.zeros((len(ranks), num_ranks))
    for of_expert, held_by in zip(shares, ranks, strict=True):
        np.add.at(of_expert, list(destinations_of(held_by, num_ranks)), 1 / num_ranks)
    return shares


def evened_out(ranks: Sequence[Ranks], load: NDArray[np.floating], num_ranks: int, max_moves: int) -> tuple[Ranks, ...]:
    """The ranks of each expert after at most `max_moves` moves, each of which lowers the heaviest rank's load.

    load: [E]. Ranks hold as many experts as before, and every expert stays somewhere. A replica is taken to bear an
    equal part of its expert's load. The input itself if no move helps.
    """
    held = np.zeros((len(ranks), num_ranks), np.bool_)
    for expert, held_by in enumerate(ranks):
        held[expert, list(held_by)] = True
    before = held.copy()
    weight = load.astype(np.float64)
    for _ in range(max_moves):
        move = _best_exchange(held, weight)
        move = _best_relief(held, weight, move)
        if move is None:
            break
        held = move[1]
    if (held == before).all():
        return tuple(ranks)
    return ordered_ranks([np.flatnonzero(of_expert).tolist() for of_expert in held], weight, num_ranks)


Move = tuple[float, NDArray[np.bool_]]


def _totals(held: NDArray[np.bool_], weight: Float) -> Float:
    """[R]: the load of each rank."""
    return (weight / held.sum(axis=1)) @ held


def _best_exchange(held: NDArray[np.bool_], weight: Float) -> Move | None:
    """The exchange of two experts that lowers the heaviest rank most: (heaviest load of the two afterwards, held)."""
    share = weight / held.sum(axis=1)
    totals = share @ held
    heavy = int(totals.argmax())
    best: tuple[float, int, int, int] | None = None
    for other in range(held.shape[1]):
        leaving = np.flatnonzero(held[:, heavy] & ~held[:, other])
        coming = np.flatnonzero(held[:, other] & ~held[:, heavy])
        if not len(leaving) or not len(coming):
            continue
        relief = share[leaving][:, None] - share[coming][None, :]
        worst = np.maximum(totals[heavy] - relief, totals[other] + relief)
        one, two = np.unravel_index(worst.argmin(), worst.shape)
        if best is None or worst[one, two] < best[0]:
            best = float(worst[one, two]), other, int(leaving[one]), int(coming[two])
    if best is None or best[0] >= totals[heavy] * (1 - 1e-9):
        return None
    worst_after, other, out, back = best
    changed = held.copy()
    changed[[out, back], heavy] = False, True
    changed[[out, back], other] = True, False
    return worst_after, changed


def _best_relief(held: NDArray[np.bool_], weight: Float, best: Move | None) -> Move | None:
    """The move that replaces a replica by one of an expert of the heaviest rank, if it is better than `best`."""
    totals = _totals(held, weight)
    heavy = int(totals.argmax())
    bound = totals[heavy] * (1 - 1e-9) if best is None else best[0]
    counts = held.sum(axis=1)
    now = held * (weight / counts)[:, None]
    for other in range(held.shape[1]):
        out = np.flatnonzero(held[:, other] & (counts > 1))
        into = np.flatnonzero(held[:, heavy] & ~held[:, other])
        if not len(out) or not len(into):
            continue
        without, grown = held[out], held[into]
        without[:, other], grown[:, other] = False, True
        change_out = without * (weight[out] / (counts[out] - 1))[:, None] - now[out]
        change_into = grown * (weight[into] / (counts[into] + 1))[:, None] - now[into]
        worst = (totals + change_out[:, None] + change_into[None, :]).max(axis=2)
        one, two = np.unravel_index(worst.argmin(), worst.shape)
        if worst[one, two] < bound:
            bound = float(worst[one, two])
            changed = held.copy()
            changed[[out[one], into[two]], other] = False, True
            best = bound, changed
    return best
