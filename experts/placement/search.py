"""Find placements: by name, by load, or co-activation, and a few moves at a time while serving. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement import (
    Placement,
    PlacementError,
    Ranks,
    contiguous,
    destinations_of,
    from_first_ranks,
    round_robin,
)
from experts.routing.choices import RoutingStatistics

Counts = NDArray[np.float64]
Float = NDArray[np.float64]
Ids = NDArray[np.integer]
Load = NDArray[np.floating]
# [E] or [L, E]: the rank of each expert.
RankOf = NDArray[np.int64]
# The heaviest load afterwards, and [E, R]: True where the rank holds the expert.
Move = tuple[float, NDArray[np.bool_]]

# The names of placements that need no statistics, and of placements learnt from them.
PLAIN: Final = ("contiguous", "round-robin")
LEARNT: Final = ("balanced", "coactivation")

# Co-activation stops after this many exchanges without a better placement.
_PATIENCE = 8
# Held-out tokens are compared in this many runs, because neighbours choose alike.
_NUM_RUNS = 16
_STANDARD_ERRORS = 2.0
# Gains are whole tokens, computed in floating point.
_ONE_TOKEN = 0.5
# The cost of a unit of load above the bound, in tokens.
_OVERLOAD = 1e3


def choose_placement(
    name: str,
    sizes: Sequence[int],
    *,
    num_redundant: int = 0,
    num_nodes: int = 1,
    num_groups: int = 1,
    statistics: RoutingStatistics | None = None,
) -> Placement:
    """Return the placement `name`, one of PLAIN or LEARNT.

    sizes: layers with experts, experts, ranks. num_redundant: replicas per layer, of the busiest experts.

    num_nodes, num_groups: see `load_balanced`; the other placements ignore them.

    Without statistics all experts count as equally busy. PlacementError if the sizes do not divide, or if the
    statistics are missing, empty or of other sizes.
    """
    num_layers, num_experts, num_ranks = sizes
    if statistics is None:
        if name in LEARNT:
            raise PlacementError(f"A {name} placement is learnt from statistics, and there are none.")
        load = np.ones((num_layers, num_experts), np.float32)
    else:
        load = statistics.load()
        if load.shape != (num_layers, num_experts):
            raise PlacementError(
                f"The statistics are of {load.shape[0]} layers with {load.shape[1]} experts, "
                f"but the model has {num_layers} with {num_experts}."
            )
        if name in LEARNT and not load.any():
            raise PlacementError(f"A {name} placement is learnt from statistics, and these are empty.")
    if name == "balanced":
        return load_balanced(load, num_ranks, num_redundant=num_redundant, num_nodes=num_nodes, num_groups=num_groups)
    if name == "contiguous":
        placement = contiguous(num_layers, num_experts, num_ranks)
    elif name == "round-robin":
        placement = round_robin(num_layers, num_experts, num_ranks)
    else:
        assert statistics is not None
        placement = _learnt(name, statistics, num_ranks)
    return with_replicas(placement, load, num_redundant) if num_redundant else placement


def _learnt(name: str, statistics: RoutingStatistics, num_ranks: int) -> Placement:
    num_experts = statistics.load().shape[1]
    if name == "coactivation":
        return coactivation_placement(statistics.recent(), num_experts, num_ranks)
    raise PlacementError(f"There is no placement {name!r}.")


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


def coactivation_placement(
    routing: Ids, num_experts: int, num_ranks: int, *, max_load: float | None = 1.1
) -> Placement:
    """Place experts that tokens choose together on one rank, each layer by itself. Deterministic.

    A token costs one row per rank that it touches, so the number of distinct ranks is minimised. The load of a rank is
    bounded: with skewed routing, all popular experts on one rank would be the cheapest placement and the slowest.

    routing: [L, T, k], a sample of tokens in order (`RoutingStatistics.recent`). max_load: bound of a rank's load in
    units of the mean load; a layer that `load_balanced` leaves above it is bounded by the balanced load. None: the
    bound is the busiest rank's load in the plain placement, contiguous or round-robin, that touches fewer ranks.

    A placement is first learnt on half of the tokens. If it does not save ranks on the other half, the plain placement
    is returned.
    """
    plain = _better_plain(routing, num_experts, num_ranks)
    half = routing.shape[1] // 2
    if num_ranks == 1 or half < _NUM_RUNS:
        return from_first_ranks(plain, num_ranks)
    learnt = _fewest_ranks_touched(routing[:, :half], plain, plain, num_ranks, max_load)
    if not _helps(learnt, plain, routing[:, half:]):
        return from_first_ranks(plain, num_ranks)
    return from_first_ranks(_fewest_ranks_touched(routing, plain, learnt, num_ranks, max_load), num_ranks)


def _better_plain(routing: Ids, num_experts: int, num_ranks: int) -> RankOf:
    """[L, E]: contiguous or round-robin, whichever touches fewer ranks."""
    sizes = len(routing), num_experts, num_ranks
    plain = [build(*sizes).first_ranks() for build in (contiguous, round_robin)]
    touched = [_touches(rank_of, routing).sum() for rank_of in plain]
    return plain[int(np.argmin(touched))]


def _touches(rank_of: RankOf, routing: Ids) -> Float:
    """[T]: the ranks that each token touches, summed over layers. rank_of: [L, E]."""
    ranks = rank_of[np.arange(len(routing))[:, None, None], routing]
    changes = np.diff(np.sort(ranks, axis=2), axis=2) != 0
    return (1 + changes.sum(axis=2)).sum(axis=0, dtype=np.float64)


def _helps(learnt: RankOf, plain: RankOf, routing: Ids) -> bool:
    """Return True if the learnt placement touches fewer ranks by more than chance explains."""
    saved = _touches(plain, routing) - _touches(learnt, routing)
    of_runs = np.array([run.mean() for run in np.array_split(saved, _NUM_RUNS)])
    return float(of_runs.mean()) > _STANDARD_ERRORS * float(of_runs.std(ddof=1)) / _NUM_RUNS**0.5


def _fewest_ranks_touched(routing: Ids, plain: RankOf, start: RankOf, num_ranks: int, max_load: float | None) -> RankOf:
    """[L, E]: for each layer the best placement that exchanges reach from `start` or from balanced loads."""
    num_experts = plain.shape[1]
    load = np.stack([np.bincount(ids.reshape(-1), minlength=num_experts) for ids in routing]).astype(np.float64)
    balanced = load_balanced(load, num_ranks).first_ranks()
    found = np.empty_like(plain)
    for layer, ids in enumerate(routing):
        sets = token_sets(ids, num_experts, num_ranks)
        known = plain if max_load is None else balanced
        bound = max(
            (max_load or 1.0) * load[layer].sum() / num_ranks,
            float(np.bincount(known[layer], load[layer], num_ranks).max()),
        )
        ended = [fewest_ranks(sets, begin[layer], bound, _PATIENCE) for begin in (start, balanced)]
        found[layer] = min(ended, key=partial(cost, sets, bound=bound))
    return found


@dataclass(frozen=True, slots=True)
class TokenSets:
    """The distinct expert sets of a layer's tokens. ids: [N, k], ascending. weight: [N], tokens with the set."""

    num_experts: int
    num_ranks: int
    ids: NDArray[np.int64]
    weight: Float

    def load(self) -> Float:
        """[E]: tokens that choose the expert."""
        return summed_at(self.ids, self.weight, self.num_experts)

    def on_rank(self, rank_of: RankOf) -> NDArray[np.int64]:
        """[N, R]: the number of a set's experts on each rank."""
        size = len(self.ids) * self.num_ranks
        rows = np.arange(len(self.ids))[:, None] * self.num_ranks
        return np.bincount((rows + rank_of[self.ids]).reshape(-1), minlength=size).reshape(-1, self.num_ranks)

    def ranks_touched(self, rank_of: RankOf) -> float:
        """Return the number of distinct ranks, summed over tokens."""
        return float(self.weight @ (self.on_rank(rank_of) > 0).sum(axis=1))


def token_sets(ids: NDArray[np.integer], num_experts: int, num_ranks: int) -> TokenSets:
    """Return the sets of tokens. ids: [T, k], distinct within a token."""
    distinct, counts = np.unique(np.sort(ids, axis=1).astype(np.int64), axis=0, return_counts=True)
    return TokenSets(num_experts, num_ranks, distinct, counts.astype(np.float64))


def summed_at(cells: NDArray[np.int64], weight: Float, size: int) -> Float:
    """[size]: at each place the summed weight [N] of the rows of `cells` [N, M] that contain the place."""
    return np.bincount(cells.reshape(-1), np.repeat(weight, cells.shape[1]), size).astype(np.float64, copy=False)


class Exchanges:
    """A placement of one layer and the gain of every exchange of two experts. `make` mutates it.

    The number of distinct ranks per token is the connectivity of a hypergraph whose edges are the tokens' expert sets.
    The gains of all pairs are exact, and kept up to date by looking at no more than the tokens that choose one of the
    two experts (Fiduccia and Mattheyses' gains, for Kernighan and Lin's exchanges).

    _alone_with[e, f]: tokens that choose e and f and touch e's rank for e alone; the diagonal is the saving if e
    leaves its rank. _arriving[e, r]: tokens that choose e and do not touch rank r yet.
    """

    def __init__(self, sets: TokenSets, rank_of: RankOf) -> None:
        self.rank_of = rank_of.copy()
        self._sets = sets
        self._on_rank = sets.on_rank(rank_of)
        self._alone_with = np.zeros((sets.num_experts, sets.num_experts))
        self._arriving = np.zeros((sets.num_experts, sets.num_ranks))
        order = np.argsort(sets.ids.reshape(-1), kind="stable") // sets.ids.shape[1]
        ends = np.cumsum(np.bincount(sets.ids.reshape(-1), minlength=sets.num_experts))
        self._sets_of = np.split(order, ends[:-1])
        self._count(np.arange(len(sets.ids)), 1.0)

    def gain(self) -> Float:
        """[E, E]: rank touches saved if e and f change places; meaningless within a rank.

        A token that chooses both touches the same ranks afterwards, so `_alone_with` takes its saving back.
        """
        half = self._alone_with.diagonal()[:, None] - self._arriving[:, self.rank_of] - self._alone_with
        return half + half.T

    def make(self, one: int, other: int) -> None:
        chosen = np.unique(np.concatenate([self._sets_of[one], self._sets_of[other]]))
        self._count(chosen, -1.0)
        ids = self._sets.ids[chosen]
        moved = (ids == one).sum(axis=1) - (ids == other).sum(axis=1)
        here, there = self.rank_of[[one, other]]
        self._on_rank[chosen, here] -= moved
        self._on_rank[chosen, there] += moved
        self.rank_of[[one, other]] = there, here
        self._count(chosen, 1.0)

    def _count(self, chosen: NDArray[np.int64], sign: float) -> None:
        """Add the contribution of these sets to both tables, or subtract it (sign -1.0)."""
        size, num_ranks = self._sets.num_experts, self._sets.num_ranks
        ids, weight = self._sets.ids[chosen], sign * self._sets.weight[chosen]
        on_rank = self._on_rank[chosen]
        row, place = np.nonzero(np.take_along_axis(on_rank, self.rank_of[ids], axis=1) == 1)
        cells = ids[row, place][:, None] * size + ids[row]
        self._alone_with += summed_at(cells, weight[row], size * size).reshape(size, size)
        row, rank = np.nonzero(on_rank == 0)
        cells = ids[row] * num_ranks + rank[:, None]
        self._arriving += summed_at(cells, weight[row], size * num_ranks).reshape(size, num_ranks)


def fewest_ranks(sets: TokenSets, start: RankOf, bound: float, patience: int) -> RankOf:
    """Return the best placement [E] on a path of exchanges from `start`, which ends `patience` exchanges after it.

    The best exchange is made even if it loses, and its experts then rest for some steps (Glover's tabu search).
    bound: the bound of a rank's load. Load above it costs more than ranks touched, so it is removed first if possible.
    """
    exchanges = Exchanges(sets, start)
    load = sets.load()
    best, gained, most, since = start, 0.0, 0.0, 0
    rests_until = np.zeros(sets.num_experts, np.int64)
    tenure = max(2, sets.num_experts // 8)
    for step in range(1, 100 * sets.num_experts):
        gain = exchanges.gain() - _OVERLOAD * _more_overload(exchanges.rank_of, load, sets.num_ranks, bound)
        gain[exchanges.rank_of[:, None] == exchanges.rank_of] = -np.inf
        resting = rests_until >= step
        gain[(resting[:, None] | resting) & (gained + gain < most + _ONE_TOKEN)] = -np.inf
        one, other = divmod(int(gain.argmax()), sets.num_experts)
        if gain[one, other] == -np.inf:
            break
        gained += float(gain[one, other])
        exchanges.make(one, other)
        rests_until[[one, other]] = step + tenure
        since += 1
        if gained > most + _ONE_TOKEN:
            best, most, since = exchanges.rank_of.copy(), gained, 0
        elif since == patience:
            break
    return best


def cost(sets: TokenSets, rank_of: RankOf, bound: float) -> float:
    """Return the quantity that `fewest_ranks` minimises."""
    total = np.bincount(rank_of, sets.load(), sets.num_ranks)
    return sets.ranks_touched(rank_of) + _OVERLOAD * float(np.maximum(total - bound, 0).sum())


def _more_overload(rank_of: RankOf, load: Float, num_ranks: int, bound: float) -> Float:
    """[E, E]: load above the bound that an exchange adds."""
    total = np.bincount(rank_of, load, num_ranks)[rank_of]
    after = np.maximum((total - load)[:, None] + load - bound, 0) - np.maximum(total - bound, 0)[:, None]
    added: Float = after + after.T
    return added


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
