"""Placements by load: equal loads for all ranks, with replicas of the busiest experts. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement import Placement, PlacementError, Ranks, destinations_of

Load = NDArray[np.floating]


def load_balanced(
    load: Load, num_ranks: int, *, num_redundant: int = 0, num_nodes: int = 1, num_groups: int = 1
) -> Placement:
    """Give the ranks equal loads, as far as possible, with replicas of the busiest experts.

    The three greedy steps of EPLB (github.com/deepseek-ai/EPLB): groups of experts to nodes, replicas to experts within
    a node, replicas to ranks. Unlike in EPLB, a rank never holds an expert twice, and the order of an expert's ranks
    spreads the load of home ranks that lack the expert.

    load: [L, E]. num_redundant: replicas per layer beyond the first copy of each expert. num_nodes: nodes with equally
    many ranks. num_groups: groups of experts (equal runs of ids); a group stays on one node, if the nodes can share the
    groups equally. PlacementError if the sizes do not divide.
    """
    num_experts = load.shape[1]
    slots, rest = divmod(num_experts + num_redundant, num_ranks)
    if rest:
        raise PlacementError(
            f"{num_experts} experts and {num_redundant} redundant ones cannot be shared equally by {num_ranks} ranks."
        )
    if num_groups < 1 or num_nodes < 1 or num_groups % num_nodes or num_experts % num_groups or num_ranks % num_nodes:
        num_groups = num_nodes = 1
    if num_redundant < 0 or slots > num_experts // num_nodes:
        raise PlacementError(f"{num_redundant} redundant experts are too many or too few for {num_experts} experts.")
    return Placement(
        num_ranks, tuple(_layer(of_experts, num_ranks, slots, num_nodes, num_groups) for of_experts in load)
    )


def with_replicas(placement: Placement, load: Load, num_redundant: int) -> Placement:
    """Add replicas of the busiest experts to a placement that has none; experts stay where they are.

    load: [L, E]. Each copy goes to the lightest rank that has room and lacks the expert. PlacementError if
    the copies cannot be shared equally.
    """
    num_ranks = placement.num_ranks
    extra, rest = divmod(num_redundant, num_ranks)
    if rest or not 0 <= extra <= placement.num_experts - placement.slots_per_rank(0):
        raise PlacementError(f"{num_redundant} redundant experts cannot be shared equally among {num_ranks} ranks.")
    layers = []
    for of_experts, ranks in zip(load, placement.ranks, strict=True):
        held = [set(placed) for placed in ranks]
        room = [extra] * num_ranks
        for _ in range(num_redundant):
            _add_copy(held, room, of_experts)
        layers.append(ordered_ranks([sorted(placed) for placed in held], of_experts, num_ranks))
    return Placement(num_ranks, tuple(layers))


def ordered_ranks(held: Sequence[Sequence[int]], load: Load, num_ranks: int) -> tuple[Ranks, ...]:
    """Order each expert's ranks, the lightest so far first: the first ranks get the homes that do not divide evenly."""
    total = np.zeros(num_ranks)
    ordered: list[Ranks] = [()] * len(held)
    for expert in sorted(range(len(held)), key=lambda candidate: (-float(load[candidate]), candidate)):
        ranks = tuple(sorted(held[expert], key=lambda rank: (total[rank], rank)))
        np.add.at(total, list(destinations_of(ranks, num_ranks)), float(load[expert]) / num_ranks)
        ordered[expert] = ranks
    return tuple(ordered)


def _add_copy(held: list[set[int]], room: list[int], load: Load) -> None:
    total = [0.0] * len(room)
    for expert, ranks in enumerate(held):
        for rank in ranks:
            total[rank] += float(load[expert]) / len(ranks)
    open_ranks = [rank for rank, free in enumerate(room) if free]
    _, negative = max(
        (float(load[expert]) / len(ranks), -expert)
        for expert, ranks in enumerate(held)
        if not ranks.issuperset(open_ranks)
    )
    rank = min((rank for rank in open_ranks if rank not in held[-negative]), key=lambda candidate: total[candidate])
    held[-negative].add(rank)
    room[rank] -= 1


def _layer(load: Load, num_ranks: int, slots: int, num_nodes: int, num_groups: int) -> tuple[Ranks, ...]:
    groups = np.arange(len(load)).reshape(num_groups, -1)
    node_of_group = _pack(load[groups].sum(axis=1), num_nodes)
    ranks_per_node = num_ranks // num_nodes
    held: list[list[int]] = [[] for _ in load]
    for node in range(num_nodes):
        experts = groups[node_of_group == node].reshape(-1)
        counts = _replicas(load[experts], ranks_per_node * slots, ranks_per_node)
        shares = [
            (float(load[expert]) / int(count), int(expert)) for expert, count in zip(experts, counts, strict=True)
        ]
        copies = [
            (share, expert) for (share, expert), count in zip(shares, counts, strict=True) for _ in range(int(count))
        ]
        for rank, of_rank in enumerate(_spread(copies, ranks_per_node, slots)):
            for expert in of_rank:
                held[expert].append(node * ranks_per_node + rank)
    return ordered_ranks(held, load, num_ranks)


def _pack(weights: Load, num_packs: int) -> NDArray[np.int64]:
    """Return the pack of each item: the heaviest first, into the lightest pack with room. Packs have equal sizes."""
    room = np.full(num_packs, len(weights) // num_packs)
    total = np.zeros(num_packs)
    pack_of = np.empty(len(weights), np.int64)
    for item in np.argsort(-weights, kind="stable"):
        pack = int(np.where(room > 0, total, np.inf).argmin())
        pack_of[item] = pack
        total[pack] += weights[item]
        room[pack] -= 1
    return pack_of


def _replicas(load: Load, num_slots: int, most: int) -> NDArray[np.int64]:
    """Return the copies of each expert, at most `most`: each slot goes to the highest load per copy so far."""
    counts = np.ones(len(load), np.int64)
    for _ in range(num_slots - len(load)):
        counts[np.where(counts < most, load / counts, -1.0).argmax()] += 1
    return counts


def _spread(copies: list[tuple[float, int]], num_ranks: int, slots: int) -> list[set[int]]:
    """Return the experts on each rank. copies: (load, expert), num_ranks * slots of them."""
    held: list[set[int]] = [set() for _ in range(num_ranks)]
    total = [0.0] * num_ranks
    share_of = {expert: share for share, expert in copies}
    for share, expert in sorted(copies, key=lambda copy: (-copy[0], copy[1])):
        open_ranks = [rank for rank in range(num_ranks) if len(held[rank]) < slots]
        able = [rank for rank in open_ranks if expert not in held[rank]]
        if able:
            rank = min(able, key=lambda candidate: total[candidate])
        else:
            rank = _exchange(held, total, share_of, open_ranks[0], expert)
        held[rank].add(expert)
        total[rank] += share
    return held


def _exchange(held: list[set[int]], total: list[float], share_of: dict[int, float], room: int, expert: int) -> int:
    """Make room for `expert`, which all ranks with room already hold, and return the rank that has room then.

    That rank gives another expert to the rank `room`, the lightest that may go there. Mutates `held` and `total`.
    """
    share, rank, given = min(
        (share_of[other], rank, other)
        for rank, experts in enumerate(held)
        if expert not in experts
        for other in experts - held[room]
    )
    held[rank].remove(given)
    held[room].add(given)
    total[rank] -= share
    total[room] += share
    return rank
