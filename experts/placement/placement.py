"""Placements: which ranks hold which experts, and their costs on recorded routing. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]
Ids = NDArray[np.integer]
# The ranks that hold an expert.
Ranks = tuple[int, ...]


class PlacementError(ValueError):
    """An invalid or impossible placement; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class Placement:
    """ranks[layer][expert]: the ranks that hold the expert, its default rank first.

    Layers are the layers with experts, in the model's order. Every expert has a rank, and no rank holds it twice. All
    ranks hold equally many experts of a layer, because their expert memory is one array. PlacementError otherwise.
    """

    num_ranks: int
    ranks: tuple[tuple[Ranks, ...], ...]

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise PlacementError(f"A placement needs at least one rank, not {self.num_ranks}.")
        for layer, experts in enumerate(self.ranks):
            if len(experts) != self.num_experts:
                raise PlacementError(f"Layer {layer} has {len(experts)} experts, layer 0 has {self.num_experts}.")
            _check_layer(layer, experts, self.num_ranks)

    @property
    def num_layers(self) -> int:
        return len(self.ranks)

    @property
    def num_experts(self) -> int:
        return len(self.ranks[0]) if self.ranks else 0

    def slots_per_rank(self, layer: int) -> int:
        """Return the number of experts of the layer on each rank, replicas included."""
        return sum(map(len, self.ranks[layer])) // self.num_ranks

    def experts_on(self, layer: int, rank: int) -> tuple[int, ...]:
        return tuple(expert for expert, ranks in enumerate(self.ranks[layer]) if rank in ranks)

    def first_ranks(self) -> NDArray[np.int64]:
        """[L, E]: the first rank of each expert."""
        return np.array([[ranks[0] for ranks in experts] for experts in self.ranks], np.int64)

    def with_layer(self, layer: int, ranks: tuple[Ranks, ...]) -> Placement:
        """Return a copy of the placement with other ranks[expert] in one layer."""
        return Placement(self.num_ranks, (*self.ranks[:layer], ranks, *self.ranks[layer + 1 :]))

    def destinations(self, layer: int) -> NDArray[np.int64]:
        """[R, E]: the rank to which a token at home on rank r is sent for expert e, if it is sent nowhere else.

        Its home if the expert is there; the other homes take the replicas in turn.
        """
        return np.array([destinations_of(ranks, self.num_ranks) for ranks in self.ranks[layer]], np.int64).T

    def serving(self, layer: int) -> Serving:
        """Return the choice among the replicas of a layer's experts."""
        holders = np.zeros((self.num_experts, self.num_ranks), np.bool_)
        for expert, ranks in enumerate(self.ranks[layer]):
            holders[expert, list(ranks)] = True
        return Serving(self.destinations(layer), holders)


@dataclass(frozen=True, slots=True)
class Serving:
    """Chooses, for each token, the rank that serves each of its experts, so that the token is sent to few ranks.

    An expert with replicas is served at home if it is there; else by a rank that the token is sent to for an expert
    without a choice, its destination first and then the lowest; else by its destination. The choice depends on the
    token's home and experts alone, so a request computes the same in any batch.

    destinations: [R, E], see `Placement.destinations`. holders: [E, R], True where the rank holds the expert.
    """

    destinations: NDArray[np.int64]
    holders: NDArray[np.bool_]

    @property
    def has_replicas(self) -> bool:
        return int(self.holders.sum()) > len(self.holders)

    def is_fixed(self) -> NDArray[np.bool_]:
        """[R, E]: True where a token at home on rank r has no choice for expert e."""
        at_home = self.destinations == np.arange(len(self.destinations))[:, None]
        return at_home | (self.holders.sum(axis=1) == 1)

    def ranks(self, homes: Ids, ids: Ids) -> NDArray[np.int64]:
        """[T, k]: the rank that serves each expert. homes: [T]. ids: [T, k]."""
        by_default: NDArray[np.int64] = self.destinations[homes[:, None], ids]
        if not self.has_replicas:
            return by_default
        num_ranks = len(self.destinations)
        fixed = self.is_fixed()[homes[:, None], ids]
        sent = np.zeros((len(ids), num_ranks + 1), np.bool_)
        np.put_along_axis(sent, np.where(fixed, by_default, num_ranks), True, axis=1)
        able = self.holders[ids] & sent[:, None, :num_ranks]
        stays = fixed | ~able.any(axis=2) | np.take_along_axis(able, by_default[..., None], axis=2)[..., 0]
        return np.where(stays, by_default, able.argmax(axis=2))


def refilled(slots: Sequence[int], held: Collection[int]) -> tuple[int, ...]:
    """Return the expert of each slot once a rank holds `held`: experts that stay keep their slots, others fill up.

    slots[s]: the expert in slot s now. There are as many slots as experts in `held`.
    """
    arriving = iter(sorted(set(held) - set(slots)))
    return tuple(expert if expert in held else next(arriving) for expert in slots)


# Cached like the destinations: while serving, a change of the placement leaves all layers but one as they are.
@lru_cache(maxsize=1024)
def _check_layer(layer: int, experts: tuple[Ranks, ...], num_ranks: int) -> None:
    held = [0] * num_ranks
    for expert, ranks in enumerate(experts):
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < num_ranks for rank in ranks):
            raise PlacementError(
                f"Expert {expert} of layer {layer} is on ranks {list(ranks)}; "
                f"it needs one or more different ranks below {num_ranks}."
            )
        for rank in ranks:
            held[rank] += 1
    if len(set(held)) > 1:
        raise PlacementError(f"The ranks hold {held} experts of layer {layer}; they must hold equally many.")


@lru_cache(maxsize=4096)
def destinations_of(ranks: Ranks, num_ranks: int) -> tuple[int, ...]:
    """Return, for each home rank, the rank that serves an expert held by `ranks`."""
    turns = iter(range(num_ranks))
    return tuple(home if home in ranks else ranks[next(turns) % len(ranks)] for home in range(num_ranks))


def from_first_ranks(first_ranks: NDArray[np.integer], num_ranks: int) -> Placement:
    """Return a placement without replicas. first_ranks: [L, E]."""
    return Placement(num_ranks, tuple(tuple((rank,) for rank in experts) for experts in first_ranks.tolist()))


def contiguous(num_layers: int, num_experts: int, num_ranks: int) -> Placement:
    """Place the first E / R experts on rank 0, the next on rank 1, and so on."""
    share = _share(num_experts, num_ranks)
    return _same_in_all_layers(num_layers, num_ranks, (expert // share for expert in range(num_experts)))


def round_robin(num_layers: int, num_experts: int, num_ranks: int) -> Placement:
    """Place expert e on rank e mod R."""
    _share(num_experts, num_ranks)
    return _same_in_all_layers(num_layers, num_ranks, (expert % num_ranks for expert in range(num_experts)))


def _same_in_all_layers(num_layers: int, num_ranks: int, ranks: Iterable[int]) -> Placement:
    return Placement(num_ranks, (tuple((rank,) for rank in ranks),) * num_layers)


def _share(num_experts: int, num_ranks: int) -> int:
    if num_ranks < 1 or num_experts % num_ranks:
        raise PlacementError(f"{num_experts} experts cannot be shared equally among {num_ranks} ranks.")
    return num_experts // num_ranks


def rank_load(load: NDArray[np.floating], placement: Placement) -> Float:
    """[L, R]: the load that arrives at each rank if tokens are at home on all ranks equally. load: [L, E]."""
    found = np.zeros((placement.num_layers, placement.num_ranks))
    for layer, of_experts in enumerate(load):
        targets = placement.destinations(layer)
        np.add.at(found[layer], targets, np.broadcast_to(of_experts / placement.num_ranks, targets.shape))
    return found


def balancedness(load: NDArray[np.floating], placement: Placement) -> Float:
    """[L]: mean over maximum of the ranks' load; 1 is perfect, 1 / R is all on one rank. A layer without load has 1."""
    of_ranks = rank_load(load, placement)
    most = of_ranks.max(axis=1)
    return np.divide(of_ranks.mean(axis=1), most, out=np.ones(len(most)), where=most > 0)
