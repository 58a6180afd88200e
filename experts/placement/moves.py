"""A few moves of experts that even out the loads of ranks, while the service runs. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from experts.placement.balanced import ordered_ranks
from experts.placement.placement import Ranks, destinations_of

Float = NDArray[np.float64]
# The heaviest load afterwards, and [E, R]: True where the rank holds the expert.
Move = tuple[float, NDArray[np.bool_]]


def load_shares(ranks: Sequence[Ranks], num_ranks: int) -> Float:
    """[E, R]: the share of an expert's load that arrives at each rank if tokens are at home on all ranks equally."""
    shares = np.zeros((len(ranks), num_ranks))
    for of_expert, held_by in zip(shares, ranks, strict=True):
        np.add.at(of_expert, list(destinations_of(held_by, num_ranks)), 1 / num_ranks)
    return shares


def evened_out(ranks: Sequence[Ranks], load: NDArray[np.floating], num_ranks: int, max_moves: int) -> tuple[Ranks, ...]:
    """Return the ranks of each expert after at most `max_moves` moves; each lowers the heaviest rank's load.

    For a service that has to load every expert that moves; `load_balanced` would move most of a layer each time. The
    heaviest rank exchanges an expert with another rank, or another rank replaces a replica by a replica of one of the
    heaviest rank's experts.

    load: [E]. Ranks hold as many experts as before, and every expert stays somewhere. All replicas of an expert are
    assumed to bear equal parts of its load. The input is returned if no move helps.
    """
    held = np.zeros((len(ranks), num_ranks), np.bool_)
    for expert, held_by in enumerate(ranks):
        held[expert, list(held_by)] = True
    before = held.copy()
    weight = load.astype(np.float64)
    for _ in range(max_moves):
        move = _relieving_exchange(held, weight)
        move = _relieving_replica(held, weight, move)
        if move is None:
            break
        held = move[1]
    if (held == before).all():
        return tuple(ranks)
    return ordered_ranks([np.flatnonzero(of_expert).tolist() for of_expert in held], weight, num_ranks)


def _totals(held: NDArray[np.bool_], weight: Float) -> Float:
    """[R]: the load of each rank."""
    return (weight / held.sum(axis=1)) @ held


def _relieving_exchange(held: NDArray[np.bool_], weight: Float) -> Move | None:
    """Return the exchange of experts that relieves the heaviest rank most: (heavier load of both ranks after, held)."""
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


def _relieving_replica(held: NDArray[np.bool_], weight: Float, best: Move | None) -> Move | None:
    """Return the best move that replaces a replica by one of an expert of the heaviest rank, or `best` if better."""
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
