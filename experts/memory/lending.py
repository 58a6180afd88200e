"""Which experts the ranks keep for each other in the memory that they lend. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement import Placement

LentExperts = tuple[tuple[int, int], ...]
"""(layer, expert) of each record that a rank lends, in the order of its memory."""


def lend_experts(
    placement: Placement, num_slots: Sequence[int], load: NDArray[np.floating], capacity: int
) -> tuple[LentExperts, ...]:
    """What each rank lends: experts that no fast tier holds at first, the busiest of all layers first.

    num_slots: of each layer in a rank's fast tier, where its busiest experts are taken to be. load: [L, E]. capacity:
    experts that a rank has room for. An expert goes to the rank that lends least so far, if there is room to one that
    does not serve it: who serves it has memory of its own for it.
    """
    lent: list[list[tuple[int, int]]] = [[] for _ in range(placement.num_ranks)]
    for layer, expert in _in_turn([_lacking(placement, num_slots, load, layer) for layer in range(len(num_slots))]):
        open_ranks = [rank for rank, of_rank in enumerate(lent) if len(of_rank) < capacity]
        if not open_ranks:
            break
        serving = placement.ranks[layer][expert]
        lender = min(open_ranks, key=lambda rank: (rank in serving, len(lent[rank]), rank))
        lent[lender].append((layer, expert))
    return tuple(map(tuple, lent))


def _lacking(
    placement: Placement, num_slots: Sequence[int], load: NDArray[np.floating], layer: int
) -> list[tuple[int, int]]:
    """(layer, expert) of those that are in no fast tier at first, the busiest first."""
    order = np.argsort(-load[layer], kind="stable").tolist()
    fast: set[int] = set()
    for rank in range(placement.num_ranks):
        held = [expert for expert in order if rank in placement.ranks[layer][expert]]
        fast.update(held[: num_slots[layer]])
    return [(layer, expert) for expert in order if expert not in fast]


def _in_turn(of_layers: Sequence[list[tuple[int, int]]]) -> Iterator[tuple[int, int]]:
    """The first of every layer, then the second of every layer, and so on."""
    for place in range(max(map(len, of_layers), default=0)):
        yield from (of_layer[place] for of_layer in of_layers if place < len(of_layer))
