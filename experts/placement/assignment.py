"""The best assignment of items to ranks with equal numbers of items on each. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Gain = NDArray[np.float64]
RankOf = NDArray[np.int64]


def balanced_assignment(gain: Gain, start: RankOf) -> RankOf:
    """A new rank_of [E] that maximises the sum of gain[e, rank_of[e]] with E / R items on each of R ranks. Exact.

    gain: [E, R]. start: [E], any balanced assignment; the closer to the best, the faster. An assignment is optimal if
    no cyclic exchange among ranks gains (Klein's cycle cancelling for transportation problems; Ahuja, Magnanti and
    Orlin, "Network Flows", section 9.6), and for a cycle only the best mover between each two ranks matters, so the
    search is over R nodes.
    """
    rank_of = start.astype(np.int64, copy=True)
    tolerance = 1e-9 * max(1.0, float(np.abs(gain).max(initial=0.0)))
    while True:
        moves, movers = _best_moves(gain, rank_of)
        cycle = _best_exchange(moves, tolerance) or _improving_cycle(moves, tolerance)
        if not cycle:
            return rank_of
        for source, target in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            rank_of[movers[source, target]] = target


def _best_moves(gain: Gain, rank_of: RankOf) -> tuple[Gain, RankOf]:
    """[R, R]: what moving one item from a rank to another gains at best, and which item that is."""
    num_ranks = gain.shape[1]
    items = np.argsort(rank_of, kind="stable")
    delta = gain[items] - gain[items, rank_of[items]][:, None]
    delta = delta.reshape(num_ranks, -1, num_ranks)
    best = delta.argmax(axis=1)
    moves = np.take_along_axis(delta, best[:, None], axis=1)[:, 0]
    movers = np.take_along_axis(items.reshape(num_ranks, -1), best, axis=1)
    np.fill_diagonal(moves, -np.inf)
    return moves, movers


def _best_exchange(moves: Gain, tolerance: float) -> list[int]:
    both = moves + moves.T
    source, target = np.unravel_index(both.argmax(), both.shape)
    return [int(source), int(target)] if both[source, target] > tolerance else []


def _improving_cycle(moves: Gain, tolerance: float) -> list[int]:
    """A cycle of ranks with a positive sum of moves, or none (Bellman and Ford, from every node at once)."""
    num_ranks = len(moves)
    reached = np.zeros(num_ranks)
    before = np.zeros(num_ranks, np.int64)
    step = tolerance / num_ranks
    last = -1
    for _ in range(num_ranks):
        through = reached[:, None] + moves
        found = through.max(axis=0)
        better = found > reached + step
        if not better.any():
            return []
        before = np.where(better, through.argmax(axis=0), before)
        reached = np.where(better, found, reached)
        last = int(better.argmax())
    for _ in range(num_ranks):
        last = int(before[last])
    cycle = [last]
    while (previous := int(before[cycle[-1]])) != last:
        cycle.append(previous)
    return cycle[::-1]
