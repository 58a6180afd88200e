"""Which ranks hold which experts. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ranks = tuple[int, ...]


class PlacementError(ValueError):
    """A placement that cannot be; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class Placement:
    """ranks[layer][expert]: the ranks that hold the expert, the first of them by default.

    Layers are those that have experts, in the model's order.

    Every expert is somewhere, never twice on a rank, and within a layer all ranks hold equally many: their
    expert memory is one array. PlacementError otherwise.
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
        """Experts of the layer on each rank, replicas included."""
        return sum(map(len, self.ranks[layer])) // self.num_ranks

    def experts_on(self, layer: int, rank: int) -> tuple[int, ...]:
        """The experts of the layer on the rank, ascending."""
        return tuple(expert for expert, ranks in enumerate(self.ranks[layer]) if rank in ranks)

    def first_ranks(self) -> NDArray[np.int64]:
        """[L, E]: the first rank of each expert."""
        return np.array([[ranks[0] for ranks in experts] for experts in self.ranks], np.int64)

    def with_layer(self, layer: int, ranks: tuple[Ranks, ...]) -> Placement:
        """The same but for one layer. ranks[expert]."""
        return Placement(self.num_ranks, (*self.ranks[:layer], ranks, *self.ranks[layer + 1 :]))

    def destinations(self, layer: int) -> NDArray[np.int64]:
        """[R, E]: where a token at home on a rank is sent for an expert.

        At home if the expert is there. The other homes take its replicas in turn. The choice depends on nothing but
        the home, so that a request computes the same in any batch.
        """
        return np.array([destinations_of(ranks, self.num_ranks) for ranks in self.ranks[layer]], np.int64).T


def refilled(slots: Sequence[int], held: Collection[int]) -> tuple[int, ...]:
    """The experts of a rank's slots once it holds `held`: who stays keeps its slot, the others fill those of leavers.

    slots[s]: the expert in slot s now; equally many as `held`.
    """
    arriving = iter(sorted(set(held) - set(slots)))
    return tuple(expert if expert in held else next(arriving) for expert in slots)


# Cached, as are the destinations: while serving, all layers but one stay when a placement changes.
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
    """For each home the rank that serves an expert held by `ranks`."""
    turns = iter(range(num_ranks))
    return tuple(home if home in ranks else ranks[next(turns) % len(ranks)] for home in range(num_ranks))


def from_first_ranks(first_ranks: NDArray[np.integer], num_ranks: int) -> Placement:
    """Without replicas. first_ranks: [L, E]."""
    return Placement(num_ranks, tuple(tuple((rank,) for rank in experts) for experts in first_ranks.tolist()))


def contiguous(num_layers: int, num_experts: int, num_ranks: int) -> Placement:
    """The first E / R experts on rank 0, the next on rank 1, and so on."""
    share = _share(num_experts, num_ranks)
    return _same_in_all_layers(num_layers, num_ranks, (expert // share for expert in range(num_experts)))


def round_robin(num_layers: int, num_experts: int, num_ranks: int) -> Placement:
    """Expert e on rank e mod R."""
    _share(num_experts, num_ranks)
    return _same_in_all_layers(num_layers, num_ranks, (expert % num_ranks for expert in range(num_experts)))


def _same_in_all_layers(num_layers: int, num_ranks: int, ranks: Iterable[int]) -> Placement:
    return Placement(num_ranks, (tuple((rank,) for rank in ranks),) * num_layers)


def _share(num_experts: int, num_ranks: int) -> int:
    if num_ranks < 1 or num_experts % num_ranks:
        raise PlacementError(f"{num_experts} experts cannot be shared equally among {num_ranks} ranks.")
    return num_experts // num_ranks
